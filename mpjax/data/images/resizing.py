"""Chooses the crop of an image, and resizes it to a square with Pillow."""

import math
from collections.abc import Callable

import numpy as np
from PIL.Image import Resampling

from mpjax.data.images.decoding import Picture, pixels


Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a crop, in pixels of the stored image."""

Frame = Callable[[int, int, np.ndarray], Box]
"""A function from the width and height of an image and its row of `draws` to its crop. Only random crops use the
draws."""

Resize = Callable[[Picture, Box, np.ndarray], None]
"""A function that decodes a picture, resizes its crop, and writes it into an array [side, side, channels] in place.

It raises UsageError if the picture cannot be decoded.
"""


def averaged(picture: Picture, box: Box, out: np.ndarray) -> None:
    """Resizes a crop into `out` by linear interpolation with antialiasing: every pixel of the crop has a weight.

    A JPEG is first decoded at a fraction of its size (`shrunk`). Raises UsageError if the picture cannot be decoded.
    """
    _resize(picture, box, out, Resampling.BILINEAR)


def nearest(picture: Picture, box: Box, out: np.ndarray) -> None:
    """Resizes a crop of class numbers into `out` by nearest neighbour, without averaging them.

    Raises UsageError if the picture cannot be decoded.
    """
    _resize(picture, box, out, Resampling.NEAREST)


def _resize(picture: Picture, box: Box, out: np.ndarray, resample: Resampling) -> None:
    size = len(out)
    box = shrunk(picture, size, box)
    image = picture.decoded()
    # The fourth channel of an array need not be transparency, by which Pillow would weigh the others.
    bands = image.split() if image.mode == "RGBA" and not isinstance(picture.stored, bytes) else [image]
    resized = [pixels(band.resize((size, size), resample, box=box)) for band in bands]
    out[:] = resized[0] if len(resized) == 1 else np.concatenate(resized, axis=-1)


def shrunk(picture: Picture, size: int, box: Box) -> Box:
    """Makes a JPEG decode at the smallest fraction of its size at which the crop still has `size` pixels per side.

    It changes `picture` in place (`Picture.shrink`), and returns the crop in pixels of the image to decode. Other
    formats, and crops with fewer pixels, are decoded at full size.
    """
    width, height = picture.size
    side = min(box[2] - box[0], box[3] - box[1])
    picture.shrink(width * size / side, height * size / side)
    across, down = picture.size[0] / width, picture.size[1] / height
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def shrinks(width: int, height: int, size: int, box: Box) -> int:
    """Computes the divisor by which `shrunk` makes a JPEG of `width` and `height` decode: 8, 4, 2 or 1 (full size)."""
    side = min(box[2] - box[0], box[3] - box[1])
    most = min(width // math.ceil(width * size / side), height // math.ceil(height * size / side))
    return next(divisor for divisor in (8, 4, 2, 1) if divisor == 1 or most >= divisor)


def centre(fraction: float = 1.0) -> Frame:
    """Builds a `Frame` that crops a centred square, whose side is the fraction `fraction` of the image's shorter side.

    >>> centre()(200, 100, None)
    (50.0, 0.0, 150.0, 100.0)
    """

    def frame(width: int, height: int, drawn: np.ndarray) -> Box:
        del drawn
        side = min(width, height) * fraction
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    return frame


_TRIES = 10
_SMALLEST, _LONGEST = 0.08, 4 / 3


def draws(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws the random numbers for the crops of `count` images: float64 [count, 10, 4], uniform in [0, 1).

    There are ten attempts per image, with four numbers each (`random_part`). It advances `rng`.
    """
    return rng.random((count, _TRIES, 4))


def random_part(width: int, height: int, drawn: np.ndarray) -> Box:
    """Computes a random crop with 8% to 100% of the image's area and an aspect ratio (width : height) of 3:4 to 4:3.

    The first attempt that fits into the image is used. If none fits, the crop is the largest centred square. It is a
    `Frame`, and not rounded to whole pixels.

    Args:
      width: the width of the image in pixels.
      height: the height of the image in pixels.
      drawn: for each attempt, random numbers in [0, 1) for the area, the aspect ratio, and the position from the left
        and from the top, [attempts, 4]; see `draws`.
    """
    for of_area, of_ratio, to_left, to_top in drawn.tolist():
        area = (_SMALLEST + (1 - _SMALLEST) * of_area) * width * height
        ratio = _LONGEST ** (2 * of_ratio - 1)
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = to_left * (width - across), to_top * (height - down)
            return left, top, left + across, top + down
    return centre()(width, height, drawn)


def whole_pixels(frame: Frame) -> Frame:
    """Builds a `Frame` that rounds the crops of `frame` to whole pixels, as `whole` does.

    >>> whole_pixels(lambda *_: (1.2, 0.5, 3.8, 0.9))(5, 5, None)
    (1.0, 0.0, 4.0, 1.0)
    """

    def rounded(width: int, height: int, drawn: np.ndarray) -> Box:
        return whole(frame(width, height, drawn), width, height)

    return rounded


def whole(box: Box, width: int, height: int) -> Box:
    """Rounds a crop to whole pixels, as floats, within an image of this size; at least one pixel along each axis."""
    left, top = min(round(box[0]), width - 1), min(round(box[1]), height - 1)
    right, bottom = min(max(round(box[2]), left + 1), width), min(max(round(box[3]), top + 1), height)
    return float(left), float(top), float(right), float(bottom)
