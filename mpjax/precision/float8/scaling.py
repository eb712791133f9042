"""Quantises to float8 by scales that are powers of two, so that scaling itself does not round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import FLOAT32


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


BLOCK = 32
"""The number of values that share a scale in the MX formats."""

SATURATE = "saturate_in_"
"""The prefix in the name of the call that limits values to a float8 dtype; the name of the dtype follows."""

_EXPONENT = np.uint32(0x7F800000)
_LARGEST_SCALE = 2.0**126
"""The inverse of a larger scale would be subnormal, and devices may flush it to zero."""


class Quantised(NamedTuple):
    """An array in float8.

    Attributes:
      values: the numbers, in float8.
      inverse: float32 powers of two, one for all numbers that share a scale; their product with `values` is the array.
    """

    values: jax.Array
    inverse: jax.Array


def scale_of(largest: Float[Array, "*S"], dtype: np.dtype) -> Float[Array, "*S"]:
    """Computes the largest power of two that scales values of up to `largest` into the range of a float8 dtype.

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
    """Finds the largest finite absolute value, as float32, of the array or along an axis, which keeps length 1.

    Values that are not finite stay visible under every scale, and must not determine the scale of other values.
    """

    def larger(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.maximum(jnp.where(a < jnp.inf, a, 0), jnp.where(b < jnp.inf, b, 0))

    # The reduction itself leaves out values that are not finite. With a mask before it, XLA would not fuse it with the
    # operations that compute `x`.
    axes = tuple(range(x.ndim)) if axis is None else (axis,)
    largest = jax.lax.reduce(jnp.abs(x), np.zeros((), x.dtype), larger, axes).astype(FLOAT32)
    return largest if axis is None else jnp.expand_dims(largest, axis)


def largest_of_all(arrays: Sequence[Float[Array, "*S K"]]) -> Float[Array, ""]:
    """Finds the largest finite absolute value of arrays with last axes of one size, as float32.

    On a GPU, one kernel reads them all.
    """
    rows = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in arrays])
    # XLA would take a single reduction apart into one for each array.
    return largest_of(jax.lax.optimization_barrier(largest_of(rows, 1)))


def quantise(x: Float[Array, "*S"], dtype: np.dtype, axis: int | None = None) -> Quantised:
    """Quantises an array with a scale from its present largest finite absolute value.

    No finite value overflows. inf and NaN stay NaN, or inf where the dtype has it, and change no other value. Values
    below the dtype's smallest number over the scale underflow to zero.

    Args:
      x: bfloat16 or float32.
      dtype: the float8 dtype.
      axis: the axis of numbers that share a scale, with length 1 in `inverse`; None if all numbers share one scale.
    """
    return quantise_by(x, largest_of(x, axis), dtype)


def quantise_by(x: Float[Array, "*S"], largest: Float[Array, "*T"], dtype: np.dtype) -> Quantised:
    """Quantises `x` like `quantise`, with a scale from a given `largest` instead of the largest value of `x`.

    Use it for a part of a larger array: `largest` is the largest finite absolute value of the whole. It must be at
    least as large as all finite values of `x`, because larger values do not saturate.
    """
    scale, inverse = _with_inverse(scale_of(largest, dtype))
    return Quantised((x * scale.astype(x.dtype)).astype(dtype), inverse)


def _with_inverse(scale: Float[Array, "*S"]) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """Computes 1 / scale. A single scale and its inverse are computed once, apart from all that read them.

    Otherwise XLA for GPUs computes both again in the kernel of each product. Their inputs then are too many for it to
    multiply the result there too: it would write an array of copies of a scale, as large as the result.
    """
    both = scale, 1 / scale
    return both if scale.ndim else jax.lax.optimization_barrier(both)


def quantise_to(x: Float[Array, "*S"], largest: Float[Array, ""], dtype: np.dtype) -> Quantised:
    """Quantises an array with an expected largest absolute value; larger finite values saturate.

    inf and NaN stay NaN, or inf where the dtype has it. The same holds for values that overflow to inf when scaled,
    which are at least 2^100 times as large as expected.
    """
    limit = float(jnp.finfo(dtype).max)
    scale, inverse = _with_inverse(scale_of(largest, dtype))

    def saturate(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)

    saturate.__name__ = f"{SATURATE}{dtype}"  # a diagnosis finds the call by this name
    return Quantised(jax.jit(saturate)(x * scale.astype(x.dtype)).astype(dtype), inverse)


def quantise_blocks(x: Float[Array, "M K"], dtype: np.dtype) -> Quantised:
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
    return Quantised(quantised.values.reshape(padded.shape), quantised.inverse[..., 0])
