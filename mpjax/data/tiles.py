"""Covers an image by squares, and joins the predictions for them into a mask of the image's size."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image


class Square(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    right: int
    bottom: int


def squares_of(width: int, height: int) -> list[Square]:
    """The fewest squares, as wide as the image's shorter side, that cover it, evenly spaced along its longer side.

    >>> [square.left for square in squares_of(5, 2)]
    [0, 2, 3]
    """
    side, longer = min(width, height), max(width, height)
    starts = np.round(np.linspace(0, longer - side, -(-longer // side))).astype(int).tolist()
    if width >= height:
        return [Square(start, 0, start + side, side) for start in starts]
    return [Square(0, start, side, start + side) for start in starts]


def joined(masks: Sequence[np.ndarray], width: int, height: int) -> np.ndarray:
    """Joins the masks of `squares_of(width, height)`, each of any size, into one mask [height, width].

    A pixel in two squares takes its class from the square with the nearer centre. Class numbers are never mixed.
    """
    squares = squares_of(width, height)
    whole = np.empty((height, width), masks[0].dtype)
    for number, (square, mask) in enumerate(zip(squares, masks, strict=True)):
        side = square.right - square.left
        stretched = np.asarray(Image.fromarray(mask).resize((side, side), Image.Resampling.NEAREST))
        # The square before keeps its half of the overlap: squares are ordered along the longer side.
        before = squares[number - 1] if number else square
        left = (square.left + before.right) // 2 if before.left < square.left else square.left
        top = (square.top + before.bottom) // 2 if before.top < square.top else square.top
        whole[top : square.bottom, left : square.right] = stretched[top - square.top :, left - square.left :]
    return whole
