"""Max-pooling whose gradient is a sum in a fixed order.

Shapes: B batch, H and W height and width of images, I and J of their windows, C channels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


Padding = tuple[tuple[int, int], tuple[int, int]]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def max_pool(
    x: Float[Array, "B H W C"], window: int, stride: int, padding: Padding = ((0, 0), (0, 0))
) -> Float[Array, "B I J C"]:
    """Takes the maximum of each window, NaN if the window has one.

    The first of equal values, in row-major order, receives the gradient.

    Gradients of overlapping windows are added in float32 or wider, in a fixed order. The gradient of
    `jax.lax.reduce_window` is a scatter on GPUs: it adds in the dtype of x, in no fixed order, and moves more bytes.

    >>> max_pool(jnp.arange(9.0).reshape(1, 3, 3, 1), 3, stride=2, padding=((1, 1), (1, 1)))[0, :, :, 0]
    Array([[4., 5.],
           [7., 8.]], dtype=float32)

    Args:
      x: [B, H, W, C].
      window: the height and width of a window.
      stride: the distance from one window to the next.
      padding: rows of -inf above and below, columns of -inf left and right; each less than `window`.

    Returns:
      [B, I, J, C] in the dtype of x, where I = (H + rows of padding - window) // stride + 1, and J likewise.
    """
    return _largest(x, window, stride, padding)[0]


@max_pool.defjvp
def _max_pool_jvp(window: int, stride: int, padding: Padding, primals: tuple, tangents: tuple) -> tuple:
    (x,), (tangent,) = primals, tangents
    y, argmax = _largest(x, window, stride, padding)
    wide = tangent.astype(widest(y.dtype, FLOAT32))
    candidates = _pixels(wide, 0, window, stride, padding)
    # Only one term of the sum is not 0. Its transpose adds up the gradients of each pixel.
    chosen = functools.reduce(
        jnp.add, (jnp.where(argmax == index, candidate, 0) for index, candidate in enumerate(candidates))
    )
    return y, chosen.astype(y.dtype)


def _largest(x: jax.Array, window: int, stride: int, padding: Padding) -> tuple[jax.Array, jax.Array]:
    """The largest value of each window, and its index from 0 in row-major order, the first of equal ones.

    NaN counts as the largest value; of several NaN, the index is that of the last.
    """
    first, *others = _pixels(x, -jnp.inf, window, stride, padding)
    best, argmax = first, jnp.zeros(first.shape, jnp.int32)
    for index, other in enumerate(others, 1):
        better = (other > best) | jnp.isnan(other)
        best, argmax = jnp.where(better, other, best), jnp.where(better, index, argmax)
    return best, argmax.astype(jnp.uint8 if window < 16 else jnp.int32)


def _pixels(x: jax.Array, value: float, window: int, stride: int, padding: Padding) -> list[jax.Array]:
    """Slices x, padded with `value`, into one array [B, I, J, C] for each position in a window, in row-major order."""
    edges = ((0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0))
    padded = jax.lax.pad(x, jnp.array(value, x.dtype), edges)
    _, height, width, _ = padded.shape
    # The last window of a strided slice ends at or before the end of the padded image.
    rows = [slice(row, height - window + row + 1, stride) for row in range(window)]
    columns = [slice(column, width - window + column + 1, stride) for column in range(window)]
    return [padded[:, row, column] for row in rows for column in columns]
