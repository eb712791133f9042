"""Resizes images without antialiasing, and decodes JPEGs for it with libjpeg-turbo."""

import numpy as np

from mpjax.data.images.decoding import Picture, pixels
from mpjax.data.images.resizing import Box, shrunk, whole
from mpjax.errors import UsageError


def require_packages() -> None:
    """Raises UsageError if a package that `linear` needs is not installed."""
    try:
        import cv2  # noqa: F401
        import simplejpeg  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--data.no_antialias needs the packages simplejpeg and OpenCV ({error}); write: "
            "pip install 'mpjax[images]'; or leave out --data.no_antialias"
        ) from error


def linear(picture: Picture, size: int, box: Box) -> np.ndarray:
    """Resizes a crop, rounded to whole pixels, by linear interpolation between the four nearest pixels.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that is not below the wanted size, so nothing of it is
    skipped: what is left to shrink is less than 2.

    Raises:
      UsageError: the picture cannot be decoded.
    """
    import cv2

    box = shrunk(picture, size, box)
    left, top, right, bottom = map(int, whole(box, *picture.size))
    found = _turbo_decoded(picture)
    if found is None:
        found = pixels(picture.decoded())
    resized = cv2.resize(found[top:bottom, left:right], (size, size), interpolation=cv2.INTER_LINEAR)
    return resized[..., None] if resized.ndim == 2 else resized


_PLAIN = {("RGB", "RGB"): "RGB", ("L", "RGB"): "RGB", ("L", "L"): "GRAY"}
"""Stored and wanted modes that libjpeg-turbo converts exactly as Pillow does, and simplejpeg's name of the result."""


def _turbo_decoded(picture: Picture) -> np.ndarray | None:
    """Decodes a JPEG to the pixels that Pillow gives, without Pillow's copies.

    Returns:
      uint8 [H, W, C]. Or None for all that is left to Pillow: other formats and colours, and a file in which
      libjpeg-turbo finds anything amiss, so that Pillow decides what is damaged and says how.
    """
    import simplejpeg

    image, stored = picture.image, picture.stored
    colours = _PLAIN.get((image.mode, picture.mode))
    if image.format != "JPEG" or colours is None or not isinstance(stored, bytes):
        return None
    try:
        found = simplejpeg.decode_jpeg(stored, colours, min_width=image.width, min_height=image.height)
    except ValueError:
        return None
    return found if found.shape[:2] == (image.height, image.width) else None
