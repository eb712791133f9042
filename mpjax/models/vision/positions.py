"""Interpolates position embeddings to another number of patches, as PyTorch's bicubic `interpolate` does.

Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981: the coefficient of the kernel is -0.75, and
-0.5 with antialiasing, in PyTorch as in Pillow.

Shapes: R and S rows before and after, N and M patches before and after, D width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def interpolated(table: Float[Array, "N D"], shape: tuple[int, int], *, antialias: bool) -> Float[Array, "M D"]:
    """Interpolates the embeddings of a square of patches to `shape` rows and columns, in float32 or wider.

    They are sums of products, not matrix products: no policy, nor tensorfloat32, rounds them.
    """
    side = math.isqrt(len(table))
    rows, columns = (_weights(side, size, antialias=antialias) for size in shape)
    grid = table.reshape(side, side, -1).astype(widest(table.dtype, FLOAT32))
    grid = jnp.sum(jnp.asarray(rows, grid.dtype)[:, :, None, None] * grid[None], axis=1)
    grid = jnp.sum(jnp.asarray(columns, grid.dtype)[None, :, :, None] * grid[:, None], axis=2)
    return grid.reshape(-1, table.shape[-1])


def _weights(before: int, after: int, *, antialias: bool) -> np.ndarray:
    """The weight of each row in each row after the interpolation, float64 [S, R]. Each sum over R is 1."""
    ratio = before / after
    stretch = max(ratio, 1.0) if antialias else 1.0
    reach = math.ceil(2 * stretch) + 1
    centres = (np.arange(after) + 0.5) * ratio - 0.5
    weights = np.zeros((after, before))
    for row, centre in enumerate(centres):
        near = np.arange(math.floor(centre) - reach, math.floor(centre) + reach + 1)
        values = _cubic((near - centre) / stretch, -0.5 if antialias else -0.75)
        if antialias:  # rows beyond the edge have no weight, where those without antialiasing are the edge itself
            values = np.where((near >= 0) & (near < before), values, 0)
        np.add.at(weights[row], np.clip(near, 0, before - 1), values)
    return weights / np.sum(weights, axis=1, keepdims=True)


def _cubic(distances: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distances)
    inside = ((a + 2) * x - (a + 3)) * x * x + 1
    outside = ((x - 5) * x + 8) * a * x - 4 * a
    return np.where(x <= 1, inside, np.where(x < 2, outside, 0.0))
