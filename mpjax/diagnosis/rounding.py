"""Half-precision numbers computed in float32: rounded by arithmetic, which no compiler may leave out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.compiled import compiled
from mpjax.precision.dtypes import BFLOAT16, FLOAT16


def round_to(values: jax.Array, dtype: np.dtype, *, ranged: bool = True) -> jax.Array:
    """Float32 `values` rounded to the nearest number of a half dtype, ties to even, and held in float32.

    Overflow gives inf, and what is too small zero, subnormals included, as in IEEE 754. A cast to float16 and back may
    be left out by XLA; `lax.reduce_precision` may not, but takes subnormals for zero. Not `ranged`, the numbers have
    as many bits but no largest and no smallest one, float32's aside.
    """
    if dtype == BFLOAT16:
        return _with_bits(values, mantissa_bits=7)
    if dtype != FLOAT16:
        return values
    if not ranged:
        return _with_bits(values, mantissa_bits=10)
    return _round_to_float16(values)


def _with_bits_numpy(values: np.ndarray, *, mantissa_bits: int) -> np.ndarray:
    # To nearest, ties to even: half of the last bit kept, less one where that bit is even, carries into it.
    bits, rest = values.view(np.uint32), 23 - mantissa_bits
    carried = bits + (np.uint32(2 ** (rest - 1) - 1) + (bits >> np.uint32(rest) & np.uint32(1)))
    return np.where(np.isfinite(values), (carried & np.uint32(2**32 - 2**rest)).view(np.float32), values)


@functools.partial(compiled, numpy=_with_bits_numpy)
def _with_bits(values: jax.Array, *, mantissa_bits: int) -> jax.Array:
    return jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=mantissa_bits)


@functools.partial(compiled, numpy=lambda values: values.astype(np.float16).astype(np.float32))
def _round_to_float16(values: jax.Array) -> jax.Array:
    normal = jax.lax.reduce_precision(values, exponent_bits=5, mantissa_bits=10)
    # Below 2^-14 the numbers of float16 lie 2^-24 apart; jnp.round takes ties to even.
    subnormal = jnp.round(values * np.float32(2**24)) * np.float32(2**-24)
    return jnp.where(jnp.abs(values) < np.float32(2**-14), subnormal, normal)


def narrowed(values: jax.Array, dtype: np.dtype) -> jax.Array:
    """Float32 `values` that are numbers of a half dtype, in that dtype: the same numbers in half the memory."""
    return _to_bfloat16(values) if dtype == BFLOAT16 else _to_float16(values)


@functools.partial(compiled, numpy=lambda values: values.astype(np.float16))
def _to_float16(values: jax.Array) -> jax.Array:
    return values.astype(FLOAT16)


@functools.partial(compiled, numpy=lambda values: values.astype(BFLOAT16))
def _to_bfloat16(values: jax.Array) -> jax.Array:
    # By their bits, as some processors' own cast takes subnormals for zero.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) >> 16
    halves = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(values), jnp.bfloat16(jnp.nan), halves)
