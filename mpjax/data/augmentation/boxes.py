"""Random rectangles inside an image: by area and aspect ratio, as crops and erased parts are drawn."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


ATTEMPTS = 10


class Boxes(NamedTuple):
    """One rectangle per image, in whole pixels; each int32 [B]."""

    top: jax.Array
    left: jax.Array
    height: jax.Array
    width: jax.Array

    def contain(self, height: int, width: int) -> jax.Array:
        """bool [B, height, width]: the pixels of images of that size that are inside."""
        rows = _between(self.top, self.height, height)
        columns = _between(self.left, self.width, width)
        return rows[:, :, None] & columns[:, None, :]


def random_boxes(
    key: jax.Array, batch: int, size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float]
) -> Boxes:
    """Rectangles of random area and shape at random places.

    Area is uniform and the logarithm of the aspect ratio is. What does not fit is drawn again, ten times in all, as in
    Zhong et al. (2017, arXiv:1708.04896) and in torchvision's crops; all draws are made at once, and the first that
    fits is taken. Where none does, the last is cut to the image.

    Args:
      key: to draw from.
      batch: how many, B.
      size: height and width of the images.
      area: smallest and largest share of the image.
      ratio: smallest and largest height over width.
    """
    height, width = size
    # One draw of all: every draw by itself takes a second to compile.
    drawn = jax.random.uniform(key, (2 * ATTEMPTS + 2, batch), jnp.float32)
    areas = (area[0] + (area[1] - area[0]) * drawn[:ATTEMPTS]) * (height * width)
    logs = math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * drawn[ATTEMPTS:-2]
    stretch = jnp.exp(logs / 2)
    heights = jnp.round(jnp.sqrt(areas) * stretch).astype(jnp.int32)
    widths = jnp.round(jnp.sqrt(areas) / stretch).astype(jnp.int32)
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    first = jnp.where(jnp.any(fits, axis=0), jnp.argmax(fits, axis=0), ATTEMPTS - 1)[None, :]
    heights = jnp.clip(jnp.take_along_axis(heights, first, axis=0)[0], 1, height)
    widths = jnp.clip(jnp.take_along_axis(widths, first, axis=0)[0], 1, width)
    return Boxes(_place(drawn[-2], height - heights), _place(drawn[-1], width - widths), heights, widths)


def _place(share: jax.Array, room: jax.Array) -> jax.Array:
    """int32 [B], each of 0 to `room` alike, from float32 [B] in [0, 1)."""
    # The product may round up to room + 1.
    return jnp.minimum(jnp.floor(share * (room + 1).astype(jnp.float32)).astype(jnp.int32), room)


def _between(start: jax.Array, length: jax.Array, size: int) -> jax.Array:
    """bool [B, size]: from `start` on for `length` places."""
    place = jnp.arange(size, dtype=jnp.int32)[None, :]
    return (place >= start[:, None]) & (place < (start + length)[:, None])
