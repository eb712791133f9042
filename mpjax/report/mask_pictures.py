"""Draws an image, its mask and the predicted mask side by side, in the same colours in every run."""

import functools

import numpy as np

from mpjax.data.fields import IGNORED


IGNORED_COLOUR = (255, 255, 255)
"""The colour of ignored pixels, distinct from the colour of every class."""

_GAP = 2  # the number of grey columns between the parts
_GREY = 128


def side_by_side(image: np.ndarray, mask: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Joins the image, the mask and the predicted mask from left to right, uint8 [H, 3 W + 4, 3].

    Args:
      image: [H, W, C], either uint8, which is unchanged, or floating point, which is stretched to the full range.
      mask: class numbers [H, W], with `IGNORED` at ignored pixels.
      predicted: class numbers [H, W].
    """
    gap = np.full((len(mask), _GAP, 3), _GREY, np.uint8)
    return np.concatenate([_visible(image), gap, coloured(mask), gap, coloured(predicted)], axis=1)


def coloured(mask: np.ndarray) -> np.ndarray:
    """Maps class numbers [H, W] to colours, uint8 [H, W, 3].

    >>> coloured(np.array([[0, 1, 2, 255]])).tolist()
    [[[0, 0, 0], [128, 0, 0], [0, 128, 0], [255, 255, 255]]]
    """
    return _palette()[mask]


@functools.cache
def _palette() -> np.ndarray:
    """The colours of Pascal VOC, uint8 [256, 3], with `IGNORED_COLOUR`.

    Bits 0, 1 and 2 of a class number are the highest bits of red, green and blue, bits 3, 4 and 5 the next, and so on.
    So neighbouring numbers have distant colours.
    """
    numbers = np.arange(256)
    channels = [sum(((numbers >> (3 * bit + channel)) & 1) << (7 - bit) for bit in range(3)) for channel in range(3)]
    palette = np.stack(channels, axis=-1).astype(np.uint8)
    palette[IGNORED] = IGNORED_COLOUR
    return palette


def _visible(image: np.ndarray) -> np.ndarray:
    """Converts an image to uint8 [H, W, 3]: one or two channels become grey; of more, the first three are kept."""
    if image.dtype != np.uint8:
        low, high = image.min(), image.max()
        image = np.round((image - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    return image[..., :3] if image.shape[-1] >= 3 else np.repeat(image[..., :1], 3, axis=-1)
