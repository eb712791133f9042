"""Quantisation to float8 by scales that are powers of two, so that scaling itself rounds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import FLOAT32


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


BLOCK = 32
"""Numbers that share a scale in the MX formats."""

SATURATE = "saturate_in_"
"""The beginning of the name of the call that limits values to a float8 dtype, whose name follows."""

_EXPONENT = np.uint32(0x7F800000)
_LARGEST_SCALE = 2.0**126
"""The inverse of a larger one would be subnormal, which devices may flush to zero."""


class Quantised(NamedTuple):
    """An array in float8.

    Attributes:
      values: the numbers, in float8.
      inverse: float32, what `values` are multiplied by to give the array: a power of two, for each number that shares
        the scale.
    """

    values: jax.Array
    inverse: jax.Array


def scale_of(largest: Float[Array, "*S"], dtype: np.dtype) -> Float[Array, "*S"]:
    """Returns the largest power of two that scales values of up to `largest` into the range of a float8 dtype.

    It is at most 2^126, whose inverse is a normal number, and 1 where `largest` is inf or NaN.

    Args:
      largest: the largest absolute value.
      dtype: the float8 dtype.

    Returns:
      float32.
    """
    limit = float(jnp.finfo(dtype).max)
    ratio = jnp.float32(limit) / jnp.maximum(largest.astype(FLOAT32), jnp.float32(limit / _LARGEST_SCALE))
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & _EXPONENT
    scale = jax.lax.bitcast_convert_type(bits, FLOAT32)
    return jnp.where(jnp.isfinite(largest), scale, jnp.float32(1))


def largest_of(x: Float[Array, "*S"], axis: int | None = None) -> Float[Array, "*T"]:
    """Returns the largest finite absolute value as float32, of all or along an axis, which stays with length 1.

    Values that are not finite stay visible whatever they are scaled by, and must not decide how others are scaled.
    """

    def larger(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.maximum(jnp.where(a < jnp.inf, a, 0), jnp.where(b < jnp.inf, b, 0))

    # What is not finite is left out within the reduction: before it, XLA would no longer fuse what makes `x` with it.
    axes = tuple(range(x.ndim)) if axis is None else (axis,)
    found = jax.lax.reduce(jnp.abs(x), np.zeros((), x.dtype), larger, axes).astype(FLOAT32)
    return found if axis is None else jnp.expand_dims(found, axis)


def quantise(x: Float[Array, "*S"], dtype: np.dtype, axis: int | None = None) -> Quantised:
    """Quantises an array by its present largest finite absolute value.

    No finite value overflows. inf and NaN stay NaN, or inf where the dtype has it, and change no other value. Values
    below the dtype's smallest number over the scale underflow to zero.

    Args:
      x: bfloat16 or float32.
      dtype: the float8 dtype.
      axis: the axis of numbers that share a scale, whose length is 1 in `inverse`; None if all share one.
    """
    return quantise_by(x, largest_of(x, axis), dtype)


def quantise_by(x: Float[Array, "*S"], largest: Float[Array, "*T"], dtype: np.dtype) -> Quantised:
    """Quantises an array as `quantise` does, by the largest finite absolute value of what it may be a part of."""
    scale = scale_of(largest, dtype)
    return Quantised((x * scale.astype(x.dtype)).astype(dtype), 1 / scale)


def quantise_to(x: Float[Array, "*S"], largest: Float[Array, ""], dtype: np.dtype) -> Quantised:
    """Quantises an array whose largest absolute value is expected to be `largest`; larger finite values saturate.

    inf and NaN stay NaN, or inf where the dtype has it. So does a value that the scale makes inf, which takes one 2^100
    times as large as expected.
    """
    scale, limit = scale_of(largest, dtype), float(jnp.finfo(dtype).max)

    def saturate(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)

    saturate.__name__ = f"{SATURATE}{dtype}"  # by which a diagnosis finds it
    return Quantised(jax.jit(saturate)(x * scale.astype(x.dtype)).astype(dtype), 1 / scale)


def quantise_blocks(x: Float[Array, "M K"], dtype: np.dtype) -> Quantised:
    """Quantises a matrix with a scale for each 32 numbers of a row; zeros fill the last block.

    Args:
      x: bfloat16 or float32.
      dtype: the float8 dtype.

    Returns:
      `values` [M, K'] and `inverse` [M, K' / 32], where K' is K rounded up to a multiple of 32.

    Source: Open Compute Project, "Microscaling Formats (MX) Specification", version 1.0, 2023. Scales are rounded up,
    as cuDNN has them, so that no value overflows.
    """
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    blocks = padded.reshape(x.shape[0], -1, BLOCK)
    found = quantise(blocks, dtype, 2)
    return Quantised(found.values.reshape(padded.shape), found.inverse[..., 0])
