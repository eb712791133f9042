"""Images and a duller version of themselves, in any proportion: color and sharpness, as Pillow's ImageEnhance has them.

Shapes: B batch, H height, W width, C channels.
"""

import jax
import jax.numpy as jnp


def blend(dull: jax.Array, images: jax.Array, factor: jax.Array) -> jax.Array:
    """`dull` where the factor is 0, `images` where it is 1, beyond them otherwise; integers in 0..255, rounded down."""
    dull, wide = dull.astype(jnp.float32), images.astype(jnp.float32)
    return jnp.clip(dull + factor * (wide - dull), 0, 255).astype(images.dtype)


def gray(images: jax.Array) -> jax.Array:
    """int32 [B, H, W]: luma of RGB by ITU-R BT.601, in Pillow's fixed-point numbers; one channel as it is."""
    wide = images.astype(jnp.int32)
    if images.shape[-1] == 1:
        return wide[..., 0]
    return jnp.right_shift(19595 * wide[..., 0] + 38470 * wide[..., 1] + 7471 * wide[..., 2] + 32768, 16)


def gray_images(images: jax.Array) -> jax.Array:
    """uint8 [B, H, W, C]: all channels are the gray."""
    return jnp.broadcast_to(gray(images).astype(jnp.uint8)[..., None], images.shape)


def smooth(images: jax.Array) -> jax.Array:
    """uint8 [B, H, W, C]: means of 3x3 pixels, the middle one counted five times; the border stays."""
    wide = images.astype(jnp.int32)
    rows = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * wide[:, 1:-1, 1:-1]
    return images.at[:, 1:-1, 1:-1].set(((2 * sums + 13) // 26).astype(jnp.uint8))
