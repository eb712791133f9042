"""Rounding to half precision by chance, so that what is lost is right on average."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mpjax.precision.dtypes import FLOAT32, as_dtype


def stochastic_round(values: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Float32 `values` in `dtype`: each one of its two neighbours, the nearer the likelier, its own value in the mean.

    Values beyond the largest of `dtype` round as by `astype`.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015 (arXiv:1502.02551), section 3.
    """
    # The barrier: XLA may leave out a rounding from float32 and back, and nothing would be left to round by chance.
    nearest = jax.lax.optimization_barrier(values.astype(as_dtype(dtype)))
    below = nearest.astype(FLOAT32)
    away = jnp.where(values > below, jnp.inf, -jnp.inf).astype(nearest.dtype)
    neighbour = jnp.nextafter(nearest, away)
    # No share is left for a neighbour that is infinite, and nan compares as not less.
    share = (values - below) / (neighbour.astype(FLOAT32) - below)
    drawn = jax.random.uniform(key, values.shape, FLOAT32)
    return jnp.where(drawn < share, neighbour, nearest)
