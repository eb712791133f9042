"""Recognises simple JPEGs, of which the first rows can be decoded alone to the same pixels as in the whole image."""

import dataclasses
import re
import struct


_START, _FRAME, _SCAN = b"\xff\xd8", 0xC0, 0xDA
_JFIF, _OTHER = 0xE0, {0xC4, 0xDB, 0xFE}  # Huffman tables, quantization tables, comments
_SAMPLING = {(1, 1), (2, 1), (2, 2)}  # horizontal and vertical sampling factors of luma; chroma has (1, 1)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The header of a baseline 8-bit JPEG in gray or YCbCr, with one scan and no segment that changes its colours.

    Args:
      width: the width in pixels.
      height: the height in pixels.
      channels: 1 for gray, 3 for YCbCr.
      height_at: the byte offset, in the file, of the two bytes of the height.
    """

    width: int
    height: int
    channels: int
    height_at: int


def plain_header(stored: bytes) -> Plain | None:
    """Reads the header of a JPEG; None if the bytes are no JPEG, or a JPEG that is not plain.

    A plain JPEG is baseline, with 8 bits in gray or YCbCr, and consists of a JFIF segment, tables, comments, a frame
    and a scan. It has no EXIF data, colour profile, Adobe segment or restart interval. Its tables and scan are not
    checked, and can be damaged.
    """
    if stored[:2] != _START:
        return None
    at, frame, jfif = 2, None, False
    while True:
        if len(stored) < at + 4 or stored[at] != 0xFF:
            return None
        marker, length = stored[at + 1], 256 * stored[at + 2] + stored[at + 3]
        end = at + 2 + length
        if length < 2 or len(stored) < end:
            return None
        if marker == _JFIF:
            jfif = length >= 16 and stored[at + 4 : at + 9] == b"JFIF\0"
            if not jfif:
                return None
        elif marker == _FRAME:
            if frame or (frame := _frame(stored[at + 4 : end], at + 5)) is None:
                return None
        elif marker == _SCAN:
            return frame if jfif else None
        elif marker not in _OTHER:
            return None
        at = end


def _frame(body: bytes, height_at: int) -> Plain | None:
    """Reads the size and the channels from the frame segment of a JPEG; None unless it is one of a plain JPEG.

    `body` is the segment without marker and length; `height_at` is the offset of the height in the file.
    """
    if len(body) not in (9, 15) or body[0] != 8:
        return None
    height, width, channels = struct.unpack_from(">HHB", body, 1)
    sampling = [divmod(factors, 16) for factors in body[7::3]]
    if not height or not width or len(body) != 6 + 3 * channels:
        return None
    if sampling[0] not in (_SAMPLING if channels == 3 else {(1, 1)}) or any(other != (1, 1) for other in sampling[1:]):
        return None
    return Plain(width, height, channels, height_at)


def first_rows(rows: int, stored: bytes, header: Plain) -> bytes:
    """Copies a plain JPEG with the height `rows` in its header, so that only its first `rows` pixel rows are decoded.

    `rows` is fewer than the height of `stored`. The compressed data stay whole: a decoder skips the rest of them with a
    warning (`ENDS`). The last row may differ from the whole image if chroma is interpolated between rows.
    """
    at = header.height_at
    return b"".join((stored[:at], struct.pack(">H", rows), memoryview(stored)[at + 2 :]))


ENDS = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")
"""The only warning of libjpeg-turbo about a scan that continues below the height, up to the end of the image."""
