"""Stochastic rounding to half precision, so that the rounding error is zero on average."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpjax.precision.dtypes import FLOAT32, as_dtype


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, UInt


def stochastic_round(values: Float[Array, "*S"], dtype: DTypeLike, key: jax.Array) -> Float[Array, "*S"]:
    """Rounds float32 `values` at random to one of their two neighbours in `dtype`.

    The nearer neighbour is more likely, so that the mean is the value itself. Values that `dtype` holds exactly stay
    the same. Values beyond the largest finite number of `dtype`, inf and NaN round as with `astype`.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015 (arXiv:1502.02551), section 3.
    """
    # Without the barrier XLA may remove the cast to half precision and back, and `values - below` would be zero.
    nearest = jax.lax.optimization_barrier(values.astype(as_dtype(dtype)))
    below = nearest.astype(FLOAT32)
    away = jnp.where(values > below, jnp.inf, -jnp.inf).astype(nearest.dtype)
    neighbour = jnp.nextafter(nearest, away)
    # The fraction of an infinite neighbour is 0, and `drawn < nan` is False: both cases keep `nearest`.
    fraction = (values - below) / (neighbour.astype(FLOAT32) - below)
    drawn = jax.random.uniform(key, values.shape, FLOAT32)
    return jnp.where(drawn < fraction, neighbour, nearest)


@functools.partial(jax.jit, inline=True)  # traced once for a shape, and not again for each array
def stochastic_bfloat16(values: Float[Array, "*S"], seed: UInt[Array, ""]) -> Float[Array, "*S"]:
    """Rounds float32 values to bfloat16 like `stochastic_round`, but fuses into the kernel that computes the values.

    Adds a random 16-bit number to the lower 16 bits, then drops them. The nearer a value is to its upper neighbour, the
    more often the sum carries into the upper bits. JAX's random bits would cost an optimizer more than its update.
    Equal seeds give equal random numbers: take another seed for each array and each update.

    Args:
      values: float32.
      seed: uint32, the seed of the random numbers.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    carried = bits + (scrambled(values.shape, seed) & jnp.uint32(0xFFFF))
    rounded = jax.lax.bitcast_convert_type((carried >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    # From the largest number on, the upper neighbour is infinite, so values round as with `astype`.
    has_neighbours = (bits & jnp.uint32(0x7FFFFFFF)) < jnp.uint32(0x7F7F0000)
    return jnp.where(has_neighbours, rounded, values.astype(jnp.bfloat16))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def scrambled(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Fills an array of `shape` with random uint32 numbers: each is a hash of the seed plus the element's flat index.

    Multipliers and shifts: Wellons, "Prospecting for Hash Functions", 2018 (nullprogram.com).
    """
    number = jnp.full(shape, seed)
    for axis in range(len(shape)):
        step = np.uint32(np.prod(shape[axis + 1 :], dtype=np.uint64) & 0xFFFFFFFF)
        number = number + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * step
    number = (number ^ (number >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    number = (number ^ (number >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return number ^ (number >> jnp.uint32(16))


def seed_of(seed: int, draws: jax.Array, number: int) -> UInt[Array, ""]:
    """Hashes a seed, the number of an update and the index of an array to the uint32 seed of that array.

    An array of seeds would be an operand of all kernels of an update. XLA fuses these kernels until they are too large,
    and then leaves values in memory between them.

    Args:
      seed: the seed of all updates.
      draws: int32, the number of updates so far.
      number: the index of the array.
    """
    update = scrambled((), jnp.uint32(seed % 2**32)) + draws.astype(jnp.uint32)
    return scrambled((), scrambled((), update) + jnp.uint32(number))
