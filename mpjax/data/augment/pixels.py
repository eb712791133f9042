"""The operations of RandAugment: lookup tables of levels, blends with a duller image, and affine moves.

Shapes: B batch, H height, W width, C channels; a table has an entry for each of the 256 levels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int, Num, UInt8


def look_up(images: UInt8[Array, "B H W C"], table: Int[Array, "B C 256"]) -> UInt8[Array, "B H W C"]:
    """Replaces each level of channel c of image b by `table[b, c, level]`, cast to uint8."""
    batch, height, width, channels = images.shape
    levels = images.reshape(batch, height * width, channels).astype(jnp.int32)
    by_level = jnp.swapaxes(table, 1, 2).astype(jnp.uint8)
    return jnp.take_along_axis(by_level, levels, axis=1, mode="promise_in_bounds").reshape(images.shape)


def histogram(images: UInt8[Array, "B H W C"]) -> Int[Array, "B C 256"]:
    """Counts the pixels of each level 0..255 in each channel of each image, int32."""

    def counted(levels: jax.Array) -> jax.Array:
        return jnp.zeros(256, jnp.int32).at[levels].add(1, mode="promise_in_bounds")

    pixels = images.reshape(images.shape[0], -1, images.shape[-1]).astype(jnp.int32)
    # vmapped over images, so that each device counts its own shard.
    return jax.vmap(jax.vmap(counted, in_axes=1))(pixels)


def identity() -> Int[Array, "1 1 256"]:
    """Builds a table that keeps every level, int32."""
    return jnp.arange(256, dtype=jnp.int32)[None, None, :]


def invert() -> Int[Array, "1 1 256"]:
    """Builds a table that inverts every level to 255 - level: black becomes white."""
    return 255 - identity()


def solarize(threshold: Int[Array, " B"]) -> Int[Array, "B 1 256"]:
    """Builds a table that inverts the levels from `threshold` on, and keeps lower ones; 256 keeps all."""
    return jnp.where(identity() < threshold[:, None, None], identity(), invert())


def posterize(bits: Int[Array, " B"]) -> Int[Array, "B 1 256"]:
    """Builds a table that keeps the highest `bits` of the 8 bits of a level, and sets the lower bits to 0."""
    dropped = (8 - bits)[:, None, None]
    return jnp.left_shift(jnp.right_shift(identity(), dropped), dropped)


def brightness(factor: Float[Array, " B"]) -> Int[Array, "B 1 256"]:
    """Builds a table that multiplies levels by `factor`, clipped to 0..255: 0 gives black, 1 keeps the image."""
    return blend(jnp.zeros_like(identity()), identity(), factor[:, None, None])


def contrast(images: UInt8[Array, "B H W C"], factor: Float[Array, " B"]) -> Int[Array, "B 1 256"]:
    """Builds a table that multiplies the distance of levels to each image's mean gray level by `factor`.

    The results are clipped to 0..255: 0 gives uniform gray, 1 keeps the image.
    """
    _, height, width, _ = images.shape
    # Whole levels and the rest of each row apart: the sum of a large image overflows int32.
    levels, rest = jnp.divmod(jnp.sum(gray(images), axis=2, dtype=jnp.int32), width)
    level, more = jnp.divmod(jnp.sum(levels, axis=1, dtype=jnp.int32), height)
    rest = more * width + jnp.sum(rest, axis=1, dtype=jnp.int32)
    mean = level + (2 * rest + height * width) // (2 * height * width)
    return blend(mean[:, None, None], identity(), factor[:, None, None])


def autocontrast(counts: Int[Array, "B C 256"]) -> Int[Array, "B C 256"]:
    """Builds a table that maps each channel's darkest level to 0 and its brightest to 255, linearly between them.

    `counts` is the `histogram` of the images. A channel of a single level is kept.
    """
    there = counts > 0
    low = jnp.argmax(there, axis=-1).astype(jnp.int32)[..., None]
    high = 255 - jnp.argmax(there[..., ::-1], axis=-1).astype(jnp.int32)[..., None]
    stretched = jnp.clip((identity() - low) * 255 // jnp.maximum(high - low, 1), 0, 255)
    return jnp.where(high > low, stretched, identity())


def equalize(counts: Int[Array, "B C 256"]) -> Int[Array, "B C 256"]:
    """Builds a table that equalizes the frequencies of each channel's levels, as Pillow does.

    `counts` is the `histogram` of the images. A channel is kept if it has fewer than 255 pixels below its brightest
    level.
    """
    before = jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts
    # The maximum counts all pixels below the brightest level that occurs.
    step = jnp.max(jnp.where(counts > 0, before, 0), axis=-1, keepdims=True) // 255
    spread = jnp.minimum((step // 2 + before) // jnp.maximum(step, 1), 255)
    return jnp.where(step > 0, spread, identity())


def blend(dull: jax.Array, images: jax.Array, factor: jax.Array) -> jax.Array:
    """Interpolates between `dull` (factor 0) and `images` (factor 1), and extrapolates for other factors.

    The arithmetic is float32. The result is clipped to 0..255 and cast to the dtype of `images`; integers are rounded
    down.
    """
    dull, floats = dull.astype(jnp.float32), images.astype(jnp.float32)
    return jnp.clip(dull + factor * (floats - dull), 0, 255).astype(images.dtype)


def gray(images: UInt8[Array, "B H W C"]) -> Int[Array, "B H W"]:
    """Computes ITU-R BT.601 luma of RGB images, int32, in Pillow's fixed-point arithmetic.

    Images of one channel lose the channel axis, and keep their levels.
    """
    integers = images.astype(jnp.int32)
    if images.shape[-1] == 1:
        return integers[..., 0]
    return jnp.right_shift(19595 * integers[..., 0] + 38470 * integers[..., 1] + 7471 * integers[..., 2] + 32768, 16)


def gray_images(images: UInt8[Array, "B H W C"]) -> UInt8[Array, "B H W C"]:
    """Converts images to gray, with the gray value of each pixel in every channel, uint8."""
    return jnp.broadcast_to(gray(images).astype(jnp.uint8)[..., None], images.shape)


def smooth(images: UInt8[Array, "B H W C"]) -> UInt8[Array, "B H W C"]:
    """Smooths images: each pixel becomes the mean of 3x3 pixels, the centre with weight 5, others 1, rounded.

    Pixels on the border of the image stay unchanged.
    """
    integers = images.astype(jnp.int32)
    vertical = integers[:, :-2] + integers[:, 1:-1] + integers[:, 2:]
    sums = vertical[:, :, :-2] + vertical[:, :, 1:-1] + vertical[:, :, 2:] + 4 * integers[:, 1:-1, 1:-1]
    return images.at[:, 1:-1, 1:-1].set(((2 * sums + 13) // 26).astype(jnp.uint8))


def warp(values: Num[Array, "B H W *C"], moves: Float[Array, "B 2 3"], fill: int) -> Num[Array, "B H W *C"]:
    """Applies an affine transform to each image or mask, of any dtype, by nearest neighbour.

    Args:
      values: the images, or masks without channels.
      moves: float32; matrix b times the coordinates (x, y, 1) of a pixel centre in output b gives its (x, y) in the
        input. x counts columns and y rows, from the top left corner of the image.
      fill: the value of output pixels that map outside the input.
    """
    batch, height, width = values.shape[:3]
    x = (jnp.arange(width, dtype=jnp.float32) + 0.5)[None, None, :]
    y = (jnp.arange(height, dtype=jnp.float32) + 0.5)[None, :, None]
    m = moves[:, :, :, None, None]
    columns = jnp.floor(m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]).astype(jnp.int32)
    rows = jnp.floor(m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]).astype(jnp.int32)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    index = (jnp.where(inside, rows * width + columns, 0)).reshape(batch, height * width, 1)
    flat = values.reshape(batch, height * width, -1)
    warped = jnp.take_along_axis(flat, index, axis=1, mode="promise_in_bounds").reshape(values.shape)
    return jnp.where(inside.reshape(inside.shape + (1,) * (values.ndim - 3)), warped, jnp.asarray(fill, values.dtype))


def rotation(degrees: Float[Array, " B"], height: int, width: int) -> Float[Array, "B 2 3"]:
    """Builds the `moves` for `warp` that rotate images counterclockwise by `degrees` around their centre."""
    angle = jnp.deg2rad(degrees)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, y = width / 2, height / 2
    return _moves(cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def shear(x: Float[Array, " B"], y: Float[Array, " B"]) -> Float[Array, "B 2 3"]:
    """Builds the `moves` for `warp` that shift each row left by `x` times its y, and each column up by `y` times its x.

    Coordinates count pixels from the top left corner, which stays in place.
    """
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    return _moves(one, x, zero, y, one, zero)


def translation(x: Float[Array, " B"], y: Float[Array, " B"]) -> Float[Array, "B 2 3"]:
    """Builds the `moves` for `warp` that shift images by `x` pixels to the left and `y` pixels up."""
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    return _moves(one, zero, x, zero, one, y)


def _moves(*entries: jax.Array) -> jax.Array:
    return jnp.stack(entries, axis=-1).reshape(-1, 2, 3)
