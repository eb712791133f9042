"""Affine moves of images in their plane: rotation, shear and translation, to the nearest pixel.

A move is a float32 [B, 2, 3] matrix from a place (x, y, 1) in the new image to the place (x, y) in the old one that is
seen there, in pixels from the upper left corner, so that pixel 0 has its centre at 0.5.
"""

import jax
import jax.numpy as jnp


def warp(values: jax.Array, moves: jax.Array, fill: int) -> jax.Array:
    """Moves images [B, H, W, C] or masks [B, H, W] of any dtype; what comes from outside is `fill`."""
    batch, height, width = values.shape[:3]
    x = (jnp.arange(width, dtype=jnp.float32) + 0.5)[None, None, :]
    y = (jnp.arange(height, dtype=jnp.float32) + 0.5)[None, :, None]
    m = moves[:, :, :, None, None]
    columns = jnp.floor(m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]).astype(jnp.int32)
    rows = jnp.floor(m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]).astype(jnp.int32)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    place = (jnp.where(inside, rows * width + columns, 0)).reshape(batch, height * width, 1)
    flat = values.reshape(batch, height * width, -1)
    found = jnp.take_along_axis(flat, place, axis=1, mode="promise_in_bounds").reshape(values.shape)
    return jnp.where(inside.reshape(inside.shape + (1,) * (values.ndim - 3)), found, jnp.asarray(fill, values.dtype))


def rotation(degrees: jax.Array, height: int, width: int) -> jax.Array:
    """Turns counterclockwise around the middle of the image; [B] degrees."""
    angle = jnp.deg2rad(degrees)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, y = width / 2, height / 2
    return _moves(cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def shear(x: jax.Array, y: jax.Array) -> jax.Array:
    """Moves each row by `x` [B] times its height in the image, each column by `y` [B] times its place."""
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    return _moves(one, x, zero, y, one, zero)


def translation(x: jax.Array, y: jax.Array) -> jax.Array:
    """Moves the image by `x` pixels to the left and `y` up, [B] each."""
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    return _moves(one, zero, x, zero, one, y)


def _moves(*entries: jax.Array) -> jax.Array:
    return jnp.stack(entries, axis=-1).reshape(-1, 2, 3)
