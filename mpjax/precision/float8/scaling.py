"""Quantises arrays to float8 by scales that are powers of two, so that scaling itself does not round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import BFLOAT16, FLOAT32


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


BLOCK = 32
"""The number of values that share a scale in the MX formats."""

SATURATE = "saturate_in_"
"""The prefix in the name of the call that limits values to a float8 dtype; the name of the dtype follows."""

_MANTISSA_BITS = 23
_EXPONENT = np.uint32(0x7F800000)
_LARGEST_SCALE = 2.0**126
"""The inverse of a larger scale would be subnormal, and devices may flush it to zero."""


class ScaledFloat8(NamedTuple):
    """An array in float8.

    Attributes:
      values: the scaled numbers, in float8.
      inverse: the inverse scales, float32 powers of two, one for all numbers that share a scale. `values` times
        `inverse` is the array, rounded.
    """

    values: jax.Array
    inverse: jax.Array


def scale_of(largest: Float[Array, "*S"], dtype: np.dtype) -> Float[Array, "*S"]:
    """Computes the largest power of two that scales values of up to `largest` into the range of a float8 dtype.

    It is at most 2^126, whose inverse is a normal number, also where `largest` is 0. It is 1 where `largest` is inf or
    NaN.

    Args:
      largest: the largest absolute value.
      dtype: the float8 dtype.

    Returns:
      float32.
    """
    return jnp.where(jnp.isfinite(largest), 1 / _inverse_for(largest.astype(FLOAT32), dtype), jnp.float32(1))


def _inverse_for(largest: Float[Array, "*S"], dtype: np.dtype) -> Float[Array, "*S"]:
    """Computes the inverse of `scale_of` for finite float32 values, without a division.

    XLA for GPUs would divide in a kernel of its own, apart from the reduction that reads the result.
    """
    limit = np.float32(jnp.finfo(dtype).max)
    exponent, mantissa = divmod(int(limit.view(np.uint32)), 1 << _MANTISSA_BITS)
    bits = jax.lax.bitcast_convert_type(jnp.maximum(largest, limit / np.float32(_LARGEST_SCALE)), jnp.uint32)
    # The exponent of largest / limit, rounded up: 1 more where the mantissa of `largest` is above that of the limit.
    above = bits + jnp.uint32((1 << _MANTISSA_BITS) - 1 - mantissa) & _EXPONENT
    return jax.lax.bitcast_convert_type(above - jnp.uint32(exponent - 127 << _MANTISSA_BITS), FLOAT32)


def largest_of(x: Float[Array, "*S"], axes: Sequence[int] | None = None) -> Float[Array, "*T"]:
    """Finds the largest finite absolute value, as float32, of the whole array or along `axes`, which it removes.

    It is 0 where no value is finite. Values that are not finite stay inf or NaN under every scale, and must not
    determine the scale of other values.
    """
    # The reduction itself leaves out values that are not finite. With a mask before it, XLA would not fuse it with the
    # operations that compute `x`.
    axes = tuple(range(x.ndim)) if axes is None else tuple(axes)
    return jax.lax.reduce(jnp.abs(x), np.zeros((), x.dtype), _larger, axes).astype(FLOAT32)


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.where(a < jnp.inf, a, 0), jnp.where(b < jnp.inf, b, 0))


def largest_of_parts(*arrays: Float[Array, "M ..."]) -> Float[Array, " P"]:
    """Finds the largest finite absolute value, as float32, of each of P groups of consecutive rows of an array.

    Several arrays, of which only the first axis may differ in size, are joined along it first. The largest of the P
    values is that of all arrays. A scalar gives a scalar. On a GPU, one kernel reads all arrays, and may compute them
    too.
    """
    x = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)
    if not x.ndim:
        return largest_of(x)
    length = math.prod(x.shape[1:])
    rows = next((rows for rows in range(x.shape[0], 0, -1) if not x.shape[0] % rows and rows * length <= _PART), 1)
    parts = x.reshape(-1, rows, *x.shape[1:])  # splits the first axis alone, which keeps a division over devices
    return largest_of(parts, tuple(range(1, parts.ndim)))


_PART = 2**14
"""The most elements that a GPU reduces to one in one kernel, about."""


def quantise(x: Float[Array, "*S"], dtype: np.dtype, axis: int | None = None) -> ScaledFloat8:
    """Quantises an array with a scale from its present largest finite absolute value.

    No finite value overflows. inf and NaN stay NaN, or inf where the dtype has it, and change no other value. Values
    below the dtype's smallest number over the scale underflow to zero.

    Args:
      x: bfloat16 or float32.
      dtype: the float8 dtype.
      axis: the axis of numbers that share a scale, with length 1 in `inverse`; None if all numbers share one scale, a
        scalar `inverse`.
    """
    if axis is None:
        return quantise_by(x, largest_of_parts(x), dtype)
    return _divided(x, _inverse_for(jnp.expand_dims(largest_of(x, (axis,)), axis), dtype), dtype)


def quantise_by(x: Float[Array, "*S"], largest: Float[Array, "*P"], dtype: np.dtype) -> ScaledFloat8:
    """Quantises `x` like `quantise`, with a scale from a given `largest` instead of the largest value of `x`.

    Use it for a part of a larger array: `largest` is the largest finite absolute value of the whole, or an array of
    several values whose maximum it is. It must be at least as large as all finite values of `x`: larger values do not
    saturate, and may become NaN or inf.
    """
    return _divided(x, _one_inverse(x, largest, dtype), dtype)


def _divided(x: jax.Array, inverse: jax.Array, dtype: np.dtype) -> ScaledFloat8:
    return ScaledFloat8((x / inverse.astype(x.dtype)).astype(dtype), inverse.astype(FLOAT32))


def _one_inverse(x: jax.Array, largest: Float[Array, "*P"], dtype: np.dtype) -> Float[Array, ""]:
    """Computes the one inverse scale (a scalar) for x from `largest`, in the kernel that finds the largest values.

    Without a barrier, XLA for GPUs computes it again in the kernel of each product. Its inputs then are too many for it
    to multiply the result there too: it would write copies of the inverse, as large as the result.
    """
    inverse = _inverse_for(largest.astype(FLOAT32), dtype)
    if x.dtype == BFLOAT16:  # exact, and another kernel need not cast it
        inverse = inverse.astype(BFLOAT16)
    return jax.lax.optimization_barrier(jnp.max(inverse))


def quantise_to(x: Float[Array, "*S"], largest: Float[Array, ""], dtype: np.dtype) -> ScaledFloat8:
    """Quantises an array with a scale from an expected largest absolute value; larger finite values saturate.

    inf and NaN stay NaN, or inf where the dtype has it. The same holds for values that overflow to inf when scaled,
    which are at least 2^100 times as large as expected.
    """
    limit = float(jnp.finfo(dtype).max)
    inverse = _one_inverse(x, largest, dtype)

    def saturate(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)

    saturate.__name__ = f"{SATURATE}{dtype}"  # a diagnosis finds the call by this name
    return ScaledFloat8(jax.jit(saturate)(x / inverse.astype(x.dtype)).astype(dtype), inverse.astype(FLOAT32))


def quantise_blocks(x: Float[Array, "M K"], dtype: np.dtype) -> ScaledFloat8:
    """Quantises a matrix with a scale for each 32 numbers of a row; zeros fill the last block.

    Args:
      x: bfloat16 or float32.
      dtype: the float8 dtype.

    Returns:
      `values` [M, K'] and `inverse` [M, K' / 32], where K' is K rounded up to a multiple of 32.

    Source: Open Compute Project, "Microscaling Formats (MX) Specification", version 1.0, 2023. Scales are rounded up,
    as in cuDNN, so that no value overflows.
    """
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    blocks = padded.reshape(x.shape[0], -1, BLOCK)
    quantised = quantise(blocks, dtype, 2)
    return ScaledFloat8(quantised.values.reshape(padded.shape), quantised.inverse[..., 0])
