"""Crops, shifts, flips and erases images at random places.

Shapes: B batch, H height, W width, C channels; h and w are the height and width of a result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Bool, Float, Int, Integer, Num


ATTEMPTS = 10


class Boxes(NamedTuple):
    """One rectangle per image, in whole pixels; each entry is int32 [B]. It may extend beyond the image."""

    top: Int[Array, " B"]
    left: Int[Array, " B"]
    height: Int[Array, " B"]
    width: Int[Array, " B"]

    def contain(self, height: int, width: int) -> Bool[Array, "B H W"]:
        """Marks the pixels inside each image's rectangle, bool [B, H, W], for images of this height and width.

        The parts of a rectangle outside the image are left out.
        """
        rows = _between(self.top, self.height, height)
        columns = _between(self.left, self.width, width)
        return rows[:, :, None] & columns[:, None, :]


def random_boxes(
    key: jax.Array, batch: int, size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float]
) -> Boxes:
    """Draws rectangles of random area and aspect ratio at random places, all inside the image.

    The area and the logarithm of the aspect ratio are uniformly distributed. Each rectangle is drawn ten times at once,
    and the first draw that fits into the image is used, as in Zhong et al. (2017, arXiv:1708.04896) and in
    torchvision's crops. If no draw fits, the last one is clipped to the image.

    Args:
      key: the random key.
      batch: the number of rectangles, B.
      size: height and width of the images.
      area: smallest and largest fraction of the image's area.
      ratio: smallest and largest height over width.
    """
    height, width = size
    # A single call draws all numbers, because each call takes a second to compile.
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
    return Boxes(_offset(drawn[-2], height - heights), _offset(drawn[-1], width - widths), heights, widths)


def _offset(uniform: jax.Array, room: jax.Array) -> jax.Array:
    """Scales float32 [B], uniform in [0, 1), to int32 [B], uniform in 0 to `room` inclusive."""
    # The product may round up to room + 1.
    return jnp.minimum(jnp.floor(uniform * (room + 1).astype(jnp.float32)).astype(jnp.int32), room)


def _between(start: jax.Array, length: jax.Array, size: int) -> jax.Array:
    """Marks the `length` positions from `start` on, of positions 0 to `size` - 1 in each row, bool [B, size]."""
    position = jnp.arange(size, dtype=jnp.int32)[None, :]
    return (position >= start[:, None]) & (position < (start + length)[:, None])


def random_resized_crop(
    images: Num[Array, "B H W C"],
    key: jax.Array,
    mask: Integer[Array, "B H W"] | None = None,
    *,
    size: tuple[int, int] | None = None,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[Num[Array, "B h w C"], Integer[Array, "B h w"] | None]:
    """Crops a random rectangle of each image, and resizes it to `size`.

    Args:
      images: uint8 or floating.
      key: the random key.
      mask: integer, cropped and resized with its image, or None.
      size: height and width of the result. None: the size of the images.
      area: smallest and largest fraction of the image's area.
      ratio: smallest and largest height over width.

    Returns:
      Images, interpolated bilinearly without antialiasing, and the mask, resized by nearest neighbour, in the dtypes of
      the arguments. Without a mask, None takes its place.
    """
    batch, height, width, _ = images.shape
    boxes = random_boxes(key, batch, (height, width), area, ratio)
    size = size or (height, width)
    return resized(images, boxes, size), None if mask is None else resized_mask(mask, boxes, size)


def resized(images: Num[Array, "B H W C"], boxes: Boxes, size: tuple[int, int]) -> Num[Array, "B h w C"]:
    """Crops each image to its box and resizes it to `size` (height, width) bilinearly, without antialiasing.

    It interpolates in float32, and casts the result to the dtype of the images; integers are rounded to the nearest.
    """
    # Two matrix products with at most two nonzero weights per row: accelerators multiply faster than they gather.
    row_weights = _weights(boxes.top, boxes.height, images.shape[1], size[0])
    column_weights = _weights(boxes.left, boxes.width, images.shape[2], size[1])
    exact = jax.lax.Precision.HIGHEST
    out = jnp.einsum("bij,bjwc->biwc", row_weights, images.astype(jnp.float32), precision=exact)
    out = jnp.einsum("bkw,biwc->bikc", column_weights, out, precision=exact)
    if jnp.issubdtype(images.dtype, jnp.integer):
        out = jnp.round(out)
    return out.astype(images.dtype)


def resized_mask(mask: Integer[Array, "B H W"], boxes: Boxes, size: tuple[int, int]) -> Integer[Array, "B h w"]:
    """Crops each mask to its box and resizes it to `size` (height, width) by nearest neighbour; the dtype stays."""
    rows = _nearest(boxes.top, boxes.height, size[0])
    columns = _nearest(boxes.left, boxes.width, size[1])
    return jax.vmap(lambda mask, rows, columns: mask[rows][:, columns])(mask, rows, columns)


def _places(length: jax.Array, size: int) -> jax.Array:
    """Computes the centres of `size` output pixels along one axis, in input pixels from the start of the crop.

    The output pixels span `length`, int32 [B], input pixels. The result is float32 [B, size].
    """
    centres = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size
    return centres[None, :] * length.astype(jnp.float32)[:, None]


def _nearest(start: jax.Array, length: jax.Array, size: int) -> jax.Array:
    """Computes the index of the nearest input pixel of each output pixel along one axis, int32 [B, size]."""
    return start[:, None] + jnp.minimum(_places(length, size).astype(jnp.int32), length[:, None] - 1)


def _weights(start: jax.Array, length: jax.Array, pixels: int, size: int) -> jax.Array:
    """Computes the weight of each input pixel in each output pixel along one axis, float32 [B, size, pixels].

    The weights are those of linear interpolation. Pixels outside the crop have weight 0.
    """
    last = length.astype(jnp.float32)[:, None] - 1
    centres = start.astype(jnp.float32)[:, None] + jnp.clip(_places(length, size) - 0.5, 0, last)
    distance = jnp.abs(centres[:, :, None] - jnp.arange(pixels, dtype=jnp.float32)[None, None, :])
    return jnp.maximum(1 - distance, 0)


def random_shift(
    images: Num[Array, "B H W *C"], padding: int, key: jax.Array, *, fill: int | None = 0
) -> Num[Array, "B H W *C"]:
    """Shifts each image by a random number of pixels, up to `padding` in either direction of each axis.

    This equals a random crop, of the original size, of the padded image.

    Args:
      images: images, or masks without channels.
      padding: the largest shift in pixels.
      key: the random key. The same key shifts images and their masks alike.
      fill: the value of pixels that are shifted in. None: the image is reflected at its edges, without repeating them.

    Returns:
      Images of the same shape and dtype.
    """
    batch, height, width, *rest = images.shape
    edges = ((0, 0), (padding, padding), (padding, padding), *[(0, 0)] * len(rest))
    padded = jnp.pad(images, edges, "reflect") if fill is None else jnp.pad(images, edges, constant_values=fill)
    offsets = jax.random.randint(key, (batch, 2), 0, 2 * padding + 1, dtype=jnp.int32)

    def cut(image: jax.Array, offset: jax.Array) -> jax.Array:
        start = (offset[0], offset[1], *[jnp.int32(0)] * len(rest))
        return jax.lax.dynamic_slice(image, start, (height, width, *rest))

    return jax.vmap(cut)(padded, offsets)


def random_flip(images: Num[Array, "B H W *C"], key: jax.Array) -> Num[Array, "B H W *C"]:
    """Flips each image or mask left to right with probability 1/2. The same key flips images and masks alike."""
    return flip_where(images, jax.random.bernoulli(key, shape=(images.shape[0],)))


def flip_where(images: Num[Array, "B H W *C"], chosen: Bool[Array, " B"]) -> Num[Array, "B H W *C"]:
    """Flips the images or masks that `chosen`, bool [B], marks left to right; others stay unchanged."""
    return jnp.where(chosen.reshape(-1, *[1] * (images.ndim - 1)), images[:, :, ::-1], images)


def random_erasing(
    images: Float[Array, "B H W C"],
    key: jax.Array,
    probability: float = 0.25,
    *,
    area: tuple[float, float] = (0.02, 1 / 3),
    ratio: tuple[float, float] = (0.3, 3.3),
) -> Float[Array, "B H W C"]:
    """Fills a random rectangle of some images with noise from N(0, 1), which resembles normalised pixels.

    Labels and masks are not affected.

    Args:
      images: floating, normalised.
      key: the random key.
      probability: the probability that an image is erased.
      area: smallest and largest fraction of the image's area.
      ratio: smallest and largest height over width.

    Returns:
      Images of the same shape and dtype.
    """
    box_key, noise_key, choice_key = jax.random.split(key, 3)
    batch, height, width, _ = images.shape
    inside = random_boxes(box_key, batch, (height, width), area, ratio).contain(height, width)
    erased = inside & jax.random.bernoulli(choice_key, probability, (batch, 1, 1))
    noise = jax.random.normal(noise_key, images.shape, jnp.float32).astype(images.dtype)
    return jnp.where(erased[..., None], noise, images)
