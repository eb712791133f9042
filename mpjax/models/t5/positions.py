"""The bias of attention scores by the distance between two positions.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019
(arXiv:1910.10683), section 2.1.

Shapes: B batch, T queries, S keys, N heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


class RelativePositions(nnx.Module):
    """A learned bias for each head and each group of distances, in float32 or wider whatever the policy.

    All blocks of a stack share it, so that its gradient is a sum over blocks, texts and pairs of positions.

    Args:
      buckets: the number of groups of distances.
      farthest: the distance from which on all are in one group.
      heads: N.
      both_sides: whether later keys have groups of their own; otherwise all of them are in that of distance 0.
      std: the standard deviation of the initial values.
    """

    def __init__(self, buckets: int, farthest: int, heads: int, *, both_sides: bool, std: float, rngs: nnx.Rngs):
        self.embedding = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (buckets, heads), FLOAT32))
        self.buckets = buckets
        self.farthest = farthest
        self.both_sides = both_sides

    def __call__(self, positions: Int[Array, "B T"], keys: int) -> Float[Array, "B N T S"]:
        """Computes the bias of queries at these positions for the keys at positions 0 to `keys` - 1.

        Positions are below `keys`.
        """
        distances = np.arange(1 - keys, keys)
        group = bucket_of(distances, self.buckets, self.farthest, both_sides=self.both_sides)
        at = jnp.arange(keys, dtype=jnp.int32)[None, None] - positions[..., None] + (keys - 1)
        table = jnp.asarray(self.embedding[...])  # an exported program has tables of NumPy
        # Cast before the rows are taken: what takes a row many times adds its gradient in the dtype of the row.
        rows = table.astype(widest(table.dtype, FLOAT32))[jnp.asarray(group, jnp.int32)[at]]
        return jnp.moveaxis(rows, -1, -3)


def bucket_of(distance: np.ndarray, buckets: int, farthest: int, *, both_sides: bool) -> np.ndarray:
    """The group of each distance, the position of the key minus that of the query; integers.

    Half of the groups are for one distance each, from 0 on, and the others, on a logarithmic scale, for those up to
    `farthest`. With `both_sides`, later keys have half of all groups; without, they are in group 0.

    >>> bucket_of(np.array([0, -1, -8, -20, -500, 1, 500]), 32, 128, both_sides=True).tolist()
    [0, 1, 8, 10, 15, 17, 31]
    """
    later = np.zeros_like(distance)
    if both_sides:
        buckets //= 2
        later = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    # In float32, as the weights were trained: at the edges of groups, float64 rounds to other ones.
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    grown = np.log(ratio) / np.float32(np.log(farthest / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + grown.astype(np.int64), buckets - 1)
    return later + np.where(distance < exact, distance, far)
