"""Finds the JPEGs that are so plain that a part of their rows can be decoded with the pixels of the whole."""

import dataclasses
import re
import struct


_START, _FRAME, _SCAN = b"\xff\xd8", 0xC0, 0xDA
_JFIF, _OTHER = 0xE0, {0xC4, 0xDB, 0xFE}  # Huffman tables, quantization tables, comments
_SAMPLING = {(1, 1), (2, 1), (2, 2)}  # of luma, across and down; chroma has (1, 1)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The header of a baseline JPEG of 8 bits in gray or YCbCr, with one scan and nothing that changes its colours.

    Args:
      width, height: in pixels.
      channels: 1 or 3.
      height_at: the position of the height in the file.
    """

    width: int
    height: int
    channels: int
    height_at: int


def plain_header(stored: bytes) -> Plain | None:
    """Reads the header of a JPEG; returns None unless it is plain.

    What is plain has JFIF's segment, tables, comments, a frame and a scan, but no EXIF, colour profile, segment of
    Adobe's or restart marker. The tables and the scan can still be damaged.
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
    """Reads precision, size and components."""
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
    """Returns a JPEG of the first rows, fewer than in `stored`: the same file with another height.

    A decoder of the result passes over the rest of the scan, and warns of it (`ENDS`). The last row may differ from the
    whole image's, if chroma is interpolated between rows.
    """
    at = header.height_at
    return b"".join((stored[:at], struct.pack(">H", rows), memoryview(stored)[at + 2 :]))


ENDS = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")
"""All that libjpeg-turbo warns of is a scan that goes on below the height, up to the end of the image."""
