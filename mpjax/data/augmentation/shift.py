"""Random shift and mirror: for small images, where cutting out a part would lose too much.

Images and their masks are moved alike by the same key.
"""

import jax
import jax.numpy as jnp


def random_shift(images: jax.Array, padding: int, key: jax.Array, *, fill: int = 0) -> jax.Array:
    """Shifts each image [H, W, ...] by up to `padding` pixels either way, a random crop of the padded image.

    Args:
      images: [B, H, W, ...].
      padding: in pixels.
      key: of the shifts.
      fill: the value of what moves in.

    Returns:
      As `images`.
    """
    batch, height, width, *rest = images.shape
    edges = ((0, 0), (padding, padding), (padding, padding), *[(0, 0)] * len(rest))
    padded = jnp.pad(images, edges, constant_values=fill)
    offsets = jax.random.randint(key, (batch, 2), 0, 2 * padding + 1, dtype=jnp.int32)

    def cut(image: jax.Array, offset: jax.Array) -> jax.Array:
        start = (offset[0], offset[1], *[jnp.int32(0)] * len(rest))
        return jax.lax.dynamic_slice(image, start, (height, width, *rest))

    return jax.vmap(cut)(padded, offsets)


def random_flip(images: jax.Array, key: jax.Array) -> jax.Array:
    """Mirrors each image of [B, H, W, ...] left to right with probability one half."""
    flip = jax.random.bernoulli(key, shape=(images.shape[0], *[1] * (images.ndim - 1)))
    return jnp.where(flip, images[:, :, ::-1], images)
