"""Resizes images by linear interpolation without antialiasing, and decodes JPEGs with libjpeg-turbo."""

import math
import threading

import numpy as np

from mpjax.data.images.decoding import Picture, pixels
from mpjax.data.images.depth import EIGHT
from mpjax.data.images.plain import ENDS, first_rows
from mpjax.data.images.resizing import Box, shrinks, shrunk, whole
from mpjax.errors import UsageError


def require_packages() -> None:
    """Raises UsageError if OpenCV or simplejpeg, which `linear` needs, cannot be imported."""
    try:
        import cv2  # noqa: F401
        import simplejpeg  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--data.no_antialias needs the packages simplejpeg and OpenCV ({error}); write: "
            "pip install 'mpjax[images]'; or leave out --data.no_antialias"
        ) from error


def linear(picture: Picture, box: Box, out: np.ndarray) -> None:
    """Resizes a crop into `out`, [side, side, channels], by linear interpolation between the four nearest pixels.

    The crop is first rounded to whole pixels. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size, if the crop is then not
    below the output size. The remaining factor along the shorter side is below 2, so no pixel of the JPEG is skipped,
    for crops below 16 times the output size.

    Raises:
      UsageError: the picture cannot be decoded.
    """
    import cv2

    size = len(out)
    crop = _plain_part(picture, size, box) if picture.header else None
    if crop is None:
        crop = _part(picture, size, box)
    flat = out[..., 0] if out.shape[-1] == 1 else out  # OpenCV has no axis of one channel
    resized = cv2.resize(crop, (size, size), dst=flat, interpolation=cv2.INTER_LINEAR)
    if resized is not flat:  # OpenCV allocates memory if it cannot use `dst`
        flat[:] = resized


def _part(picture: Picture, size: int, box: Box) -> np.ndarray:
    """Decodes the whole picture, a JPEG at a fraction of its size (`shrunk`), and returns the crop, [H, W, C].

    The dtype is uint8, or float32 for images of more than 8 bits. `size` is the side to which the crop will be resized.
    """
    box = shrunk(picture, size, box)
    left, top, right, bottom = map(int, whole(box, *picture.size))
    decoded = _turbo_decoded(picture)
    if decoded is None:
        decoded = pixels(picture.decoded())
    return decoded[top:bottom, left:right]


def _plain_part(picture: Picture, size: int, box: Box) -> np.ndarray | None:
    """Decodes the rows of a plain JPEG from the top down to the end of the crop, and returns the crop.

    The JPEG is decoded at a fraction of its size (`shrinks`), as `_part` does.

    Returns:
      uint8 [H, W, C], the same pixels as in the whole picture, in memory that the thread's next call overwrites. None
      if the JPEG is not plain, narrower than `_NARROW` or not of `_COLOURS`, or libjpeg-turbo reports an error, so that
      Pillow decides if the file is damaged and describes the damage.
    """
    import simplejpeg

    header, stored = picture.header, picture.stored
    colours = header and _COLOURS.get((header.channels, picture.channels))
    if header is None or colours is None or not isinstance(stored, bytes) or header.width < _NARROW:
        return None
    fraction = shrinks(*picture.stored_size, size, box)
    width, height = -(-header.width // fraction), -(-header.height // fraction)
    across, down = width / header.width, height / header.height
    box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    left, top, right, bottom = map(int, whole(box, width, height))
    rows = min((bottom + _BELOW) * fraction, header.height)
    cut = first_rows(rows, stored, header) if rows < header.height else stored
    shape = (-(-rows // fraction), width, picture.channels)
    memory = _memory(math.prod(shape))
    try:
        decoded = simplejpeg.decode_jpeg(cut, colours, min_width=width, min_height=shape[0], buffer=memory)
    except ValueError as error:
        if cut is stored or not ENDS.fullmatch(str(error)):
            return None
        decoded = memory[: math.prod(shape)].reshape(shape)
    return decoded[top:bottom, left:right] if decoded.shape == shape else None


_COLOURS = {(3, 3): "RGB", (1, 3): "RGB", (1, 1): "GRAY"}
"""The stored and wanted number of channels of a plain JPEG, and simplejpeg's name of the result."""

_NARROW = 8
"""The width below which two fractions can give the same size, so that simplejpeg's choice between them is unknown."""

_BELOW = 2
"""The rows decoded below the crop, because chroma at half the resolution is interpolated between rows."""

_KEPT = 2**24
"""The size, in bytes, of the largest image whose memory a thread keeps for the next one."""

_threads = threading.local()


def _memory(size: int) -> np.ndarray:
    """Allocates at least `size` bytes, uint8 with any content, which the next call in the same thread may return again.

    Reuse saves the kernel from clearing pages for each image. More than `_KEPT` bytes are not kept.
    """
    memory = getattr(_threads, "memory", None)
    if memory is None or len(memory) < size:
        memory = np.empty(size, np.uint8)
        if size <= _KEPT:
            _threads.memory = memory
    return memory


_PLAIN = {("RGB", "RGB"): "RGB", ("L", "RGB"): "RGB", ("L", "L"): "GRAY"}
"""The stored and wanted modes that libjpeg-turbo converts exactly as Pillow does, and simplejpeg's name of the
result."""


def _turbo_decoded(picture: Picture) -> np.ndarray | None:
    """Decodes a JPEG, at the size that `Picture.shrink` set, to the same pixels as Pillow but without Pillow's copies.

    Returns:
      uint8 [H, W, C]. None for images left to Pillow: other formats and colours, and files for which libjpeg-turbo
      reports an error, so that Pillow decides if the file is damaged and describes the damage.
    """
    import simplejpeg

    image, stored = picture.image, picture.stored
    colours = _PLAIN.get((image.mode, picture.mode))
    if image.format != "JPEG" or picture.depth.name != EIGHT.name or colours is None or not isinstance(stored, bytes):
        return None
    try:
        decoded = simplejpeg.decode_jpeg(stored, colours, min_width=image.width, min_height=image.height)
    except ValueError:
        return None
    return decoded if decoded.shape[:2] == (image.height, image.width) else None
