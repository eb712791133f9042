"""One vector of the features of a text's tokens, in float32.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.models.encoder.settings import Pooling, Sentence
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


SHORTEST = 1e-12
"""The smallest length that a vector is divided by, as in PyTorch's `normalize`."""


def vectors_of(
    features: Float[Array, "B T D"], lengths: Int[Array, " B"] | None, sentence: Sentence
) -> Float[Array, "B D"]:
    """Makes the vector of each text that `sentence` describes, in float32 or wider; see `pooled` and `normalized`."""
    vectors = pooled(features, lengths, sentence.pooling)
    return normalized(vectors) if sentence.normalized else vectors


def pooled(features: Float[Array, "B T D"], lengths: Int[Array, " B"] | None, pooling: Pooling) -> Float[Array, "B D"]:
    """Makes one vector of each text, in float32 or wider.

    Args:
      features: the features of the tokens, in any dtype.
      lengths: int32, the number of tokens of each text that are not padding, at least 1; all if None.
      pooling: how they become one vector.
    """
    wide = features.astype(widest(features.dtype, FLOAT32))
    if pooling == "cls":
        return wide[:, 0]
    batch, length, _ = features.shape
    lengths = jnp.full(batch, length, jnp.int32) if lengths is None else jnp.maximum(lengths, 1)
    there = (jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None])[..., None]
    if pooling == "max":
        return jnp.max(jnp.where(there, wide, jnp.finfo(wide.dtype).min), axis=1)
    count = lengths.astype(wide.dtype)[:, None]
    return jnp.sum(jnp.where(there, wide, 0), axis=1) / (count if pooling == "mean" else jnp.sqrt(count))


def normalized(vectors: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Divides vectors by their lengths, or by `SHORTEST` if that is more, in float32 or wider."""
    wide = vectors.astype(widest(vectors.dtype, FLOAT32))
    square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    # Under the root, so that the gradient of a vector of zeros is no NaN.
    return wide * jax.lax.rsqrt(jnp.maximum(square, np.asarray(SHORTEST**2, wide.dtype)))
