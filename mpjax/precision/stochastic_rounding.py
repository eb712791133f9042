"""Rounding to half precision by chance, so that what is lost is right on average."""

import jax
import jax.numpy as jnp
import numpy as np
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


def stochastic_bfloat16(values: jax.Array, seed: jax.Array) -> jax.Array:
    """As `stochastic_round` to bfloat16, for values that are rounded at every step: in the kernel that makes them.

    A value is cut off after its upper sixteen bits, and a random number added to the lower sixteen before carries into
    them as often as it is near the upper neighbour. JAX's random bits would cost an optimizer more than its update.

    Args:
      values: float32, of any shape.
      seed: uint32 scalar; another one gives other random numbers.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    carried = bits + (_scrambled(values.shape, seed) & jnp.uint32(0xFFFF))
    rounded = jax.lax.bitcast_convert_type((carried >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), rounded, values.astype(jnp.bfloat16))


def _scrambled(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Random uint32 by place in the array, from a mix of its number and the seed.

    Multiplications and shifts with the constants of Wellons, "Prospecting for Hash Functions", 2018 (nullprogram.com).
    """
    number = jnp.full(shape, seed)
    for axis in range(len(shape)):
        step = np.uint32(np.prod(shape[axis + 1 :], dtype=np.uint64) & 0xFFFFFFFF)
        number = number + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * step
    number = (number ^ (number >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    number = (number ^ (number >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return number ^ (number >> jnp.uint32(16))
