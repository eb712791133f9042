"""Changes of brightness value by value: for each image and channel a table of what its 256 levels become.

Invert, solarize, posterize, brightness, contrast, autocontrast and equalize are all of that kind, and so cost one
look-up whichever an image gets. They are those of Pillow's ImageOps and ImageEnhance, within one level of 255.

Shapes: B batch, H height, W width, C channels; a table is int32 [B, C, 256], or broadcasts to it.
"""

import jax
import jax.numpy as jnp

from mpjax.data.augmentation.blending import blend, gray


def look_up(images: jax.Array, table: jax.Array) -> jax.Array:
    """Replaces each level: uint8 [B, H, W, C] by `table[b, c, level]`."""
    batch, height, width, channels = images.shape
    levels = images.reshape(batch, height * width, channels).astype(jnp.int32)
    by_level = jnp.swapaxes(table, 1, 2).astype(jnp.uint8)
    return jnp.take_along_axis(by_level, levels, axis=1, mode="promise_in_bounds").reshape(images.shape)


def histogram(images: jax.Array) -> jax.Array:
    """int32 [B, C, 256]: how many pixels have each level."""

    def counted(levels: jax.Array) -> jax.Array:
        return jnp.zeros(256, jnp.int32).at[levels].add(1, mode="promise_in_bounds")

    pixels = images.reshape(images.shape[0], -1, images.shape[-1]).astype(jnp.int32)
    # Mapped over images, so that each device counts its own.
    return jax.vmap(jax.vmap(counted, in_axes=1))(pixels)


def identity() -> jax.Array:
    """Every level stays."""
    return jnp.arange(256, dtype=jnp.int32)[None, None, :]


def invert() -> jax.Array:
    """Black becomes white."""
    return 255 - identity()


def solarize(threshold: jax.Array) -> jax.Array:
    """Levels from the threshold on, int32 [B], are inverted."""
    return jnp.where(identity() < threshold[:, None, None], identity(), invert())


def posterize(bits: jax.Array) -> jax.Array:
    """Keeps the highest `bits`, int32 [B], of the 8."""
    dropped = (8 - bits)[:, None, None]
    return jnp.left_shift(jnp.right_shift(identity(), dropped), dropped)


def brightness(factor: jax.Array) -> jax.Array:
    """Away from black by a factor, float32 [B]: 0 gives black, 1 the image."""
    return blend(jnp.zeros_like(identity()), identity(), factor[:, None, None])


def contrast(images: jax.Array, factor: jax.Array) -> jax.Array:
    """Away from the mean gray of each image by a factor, float32 [B]: 0 gives gray, 1 the image."""
    total = jnp.sum(gray(images), axis=(1, 2), dtype=jnp.int32)
    pixels = images.shape[1] * images.shape[2]
    mean = (2 * total + pixels) // (2 * pixels)
    return blend(mean[:, None, None], identity(), factor[:, None, None])


def autocontrast(counts: jax.Array) -> jax.Array:
    """Stretches each channel from its darkest to its brightest level; `counts` as from `histogram`."""
    there = counts > 0
    low = jnp.argmax(there, axis=-1).astype(jnp.int32)[..., None]
    high = 255 - jnp.argmax(there[..., ::-1], axis=-1).astype(jnp.int32)[..., None]
    stretched = jnp.clip((identity() - low) * 255 // jnp.maximum(high - low, 1), 0, 255)
    return jnp.where(high > low, stretched, identity())


def equalize(counts: jax.Array) -> jax.Array:
    """Spreads each channel's levels so that all are about as frequent; `counts` as from `histogram`."""
    before = jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts
    # Before the brightest level that occurs are all pixels but its own.
    step = jnp.max(jnp.where(counts > 0, before, 0), axis=-1, keepdims=True) // 255
    spread = jnp.minimum((step // 2 + before) // jnp.maximum(step, 1), 255)
    return jnp.where(step > 0, spread, identity())
