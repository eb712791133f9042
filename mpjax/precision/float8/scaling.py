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
_SMALLEST = 2.0**-100
"""The smallest maximum that is scaled up to the whole range: its scale, and that scale's inverse, are normal."""


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

    It is 1 where `largest` is inf or NaN, so that these stay what they are.

    Args:
      largest: the largest absolute value.
      dtype: the float8 dtype.

    Returns:
      float32.
    """
    ratio = jnp.float32(float(jnp.finfo(dtype).max)) / jnp.maximum(largest.astype(FLOAT32), _SMALLEST)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & _EXPONENT
    scale = jax.lax.bitcast_convert_type(bits, FLOAT32)
    return jnp.where(jnp.isfinite(largest), scale, jnp.float32(1))


def largest_of(x: Float[Array, "*S"], axis: int | None = None) -> Float[Array, "*T"]:
    """Returns the largest absolute value as float32, of all or along an axis, which stays with length 1."""
    return jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None).astype(FLOAT32)


def quantise(x: Float[Array, "*S"], dtype: np.dtype, axis: int | None = None) -> Quantised:
    """Quantises an array by its present largest absolute value.

    No finite value overflows. inf and NaN stay NaN, or inf where the dtype has it. Values below the dtype's smallest
    number over the scale underflow to zero.

    Args:
      x: bfloat16 or float32.
      dtype: the float8 dtype.
      axis: the axis of numbers that share a scale, whose length is 1 in `inverse`; None if all share one.
    """
    scale = scale_of(largest_of(x, axis), dtype)
    return Quantised((x * scale.astype(x.dtype)).astype(dtype), 1 / scale)


def quantise_to(x: Float[Array, "*S"], largest: Float[Array, ""], dtype: np.dtype) -> Quantised:
    """Quantises an array whose largest absolute value is expected to be `largest`; larger finite values saturate.

    inf and NaN stay NaN, or inf where the dtype has it.
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
