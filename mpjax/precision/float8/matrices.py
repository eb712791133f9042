"""Multiplies two matrices in float8, for each of the three products of a layer: its result and its two derivatives.

Shapes: M rows of activations (batch times positions), K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.float8.scaling import BLOCK, ScaledFloat8, quantise, quantise_blocks, quantise_by


ACTIVATIONS, WEIGHT, GRADIENT = range(3)
"""The role of an operand: activations [M, K], a weight [K, N], or the gradient of the result [M, N]."""


class Largest(NamedTuple):
    """The largest finite absolute values of operands, float32, as far as they are known before a product.

    None for an operand whose largest value the product finds itself. An array of several numbers stands for the largest
    of them.
    """

    activations: jax.Array | None = None
    weight: jax.Array | None = None
    gradient: jax.Array | None = None


UNKNOWN = Largest()


class Way(NamedTuple):
    """One of the three products of a layer: the result, or the gradient of the activations or of the weight.

    Attributes:
      roles: the role of each operand: `ACTIVATIONS`, `WEIGHT` or `GRADIENT` (of the result).
      axes: the axis of each operand, 0 or 1, that is summed over.
    """

    roles: tuple[int, int]
    axes: tuple[int, int]

    def dtype(self, recipe: Recipe, operand: int) -> np.dtype:
        """The float8 dtype of an operand, by its index (0 or 1), under a recipe."""
        return recipe.gradient if self.roles[operand] == GRADIENT else recipe.forward

    @property
    def exact(self) -> bool:
        """True if all sums must be in float32.

        On Hopper, cuBLASLt's fast sums have fewer bits, which is good enough for a forward pass (NVIDIA,
        TransformerEngine, "split accumulator").
        """
        return GRADIENT in self.roles


FORWARD = Way((ACTIVATIONS, WEIGHT), (1, 0))
BY_ACTIVATIONS = Way((GRADIENT, WEIGHT), (1, 1))
BY_WEIGHT = Way((ACTIVATIONS, GRADIENT), (0, 0))


def in_float8(
    recipe: Recipe, way: Way, dtype: np.dtype, a: jax.Array, b: jax.Array, largest: Largest = UNKNOWN
) -> jax.Array:
    """Quantises two matrices to float8, with scales from their present values, and multiplies them.

    Args:
      recipe: the recipe; a delayed recipe uses the present values too.
      way: which product of a layer it is.
      dtype: the dtype of the result.
      a: the first operand, bfloat16 or float32.
      b: the second operand, bfloat16 or float32.
      largest: the largest absolute values of operands where they are known already, for a recipe with one scale for
        each whole operand; others ignore it.
    """
    if recipe.scaling == "block":
        blocked = (x if axis else x.T for x, axis in zip((a, b), way.axes, strict=True))
        aq, bq = (quantise_blocks(x, way.dtype(recipe, i)) for i, x in enumerate(blocked))
        return multiplied_in_blocks(aq, bq, dtype)
    shared = way.axes if recipe.scaling == "row" else (None, None)

    def quantised(i: int, x: jax.Array, axis: int | None) -> ScaledFloat8:
        known = largest[way.roles[i]]
        if axis is None and known is not None:
            # What computed the largest value may have rounded it otherwise, in the last bit: up to 464 rounds to 448.
            return quantise_by(x, known, way.dtype(recipe, i))
        return quantise(x, way.dtype(recipe, i), axis)

    aq, bq = (quantised(i, x, axis) for i, (x, axis) in enumerate(zip((a, b), shared, strict=True)))
    return multiplied(way, dtype, aq, bq)


def multiplied(way: Way, dtype: np.dtype, a: ScaledFloat8, b: ScaledFloat8) -> jax.Array:
    """Multiplies two quantised matrices, and their inverse scales into the result.

    The inverse scales are two scalars, or one number for each row and each column of the result. The smaller inverse
    scale multiplies the result first, then the larger. Their product, or the result times the larger alone, may
    overflow or underflow where the result does not.
    """
    precision = lax.Precision.HIGHEST if way.exact else None
    numbers = (((way.axes[0],), (way.axes[1],)), ((), ()))
    y = lax.dot_general(a.values, b.values, numbers, precision=precision, preferred_element_type=dtype)
    row_scales, column_scales = a.inverse, b.inverse
    if row_scales.ndim:
        row_scales, column_scales = row_scales.reshape(-1, 1), column_scales.reshape(1, -1)
    return (
        y * jnp.minimum(row_scales, column_scales).astype(dtype) * jnp.maximum(row_scales, column_scales).astype(dtype)
    )


def derivatives(way: Way, dtype: np.dtype, a: jax.Array, b: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the derivatives of a product with respect to its two operands, by products that are not in float8.

    Each derivative has the dtype of its operand.

    Args:
      way: the product of a layer.
      dtype: the dtype of its result.
      a: one operand.
      b: the other operand.
      u: the gradient of its result.
    """
    wide = jnp.result_type(a, b, u)

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        numbers = (((way.axes[0],), (way.axes[1],)), ((), ()))
        return lax.dot_general(a.astype(wide), b.astype(wide), numbers).astype(dtype)

    return jax.vjp(plain, a, b)[1](u)


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def multiplied_in_blocks(a: ScaledFloat8, b: ScaledFloat8, dtype: np.dtype) -> jax.Array:
    """Multiplies [M, K] by the transpose of [N, K], with a scale for each 32 numbers along K.

    On CUDA the product is in float8. Elsewhere the operands are scaled back and multiplied in `dtype`.

    Args:
      a: `values` [M, K] and `inverse` [M, K / 32].
      b: `values` [N, K] and `inverse` [N, K / 32].
      dtype: the dtype of the result.

    Returns:
      [M, N].
    """

    def by_blocks(a: ScaledFloat8, b: ScaledFloat8) -> jax.Array:
        return multiplied_on_cuda(a, b, dtype)

    def float8_blocks_multiplied_out(a: ScaledFloat8, b: ScaledFloat8) -> jax.Array:
        x, w = (matrix.values.astype(dtype) * jnp.repeat(matrix.inverse.astype(dtype), BLOCK, 1) for matrix in (a, b))
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)

    return lax.platform_dependent(a, b, cuda=by_blocks, default=jax.jit(float8_blocks_multiplied_out))


def multiplied_on_cuda(a: ScaledFloat8, b: ScaledFloat8, dtype: np.dtype) -> jax.Array:
    """Multiplies like `multiplied_in_blocks`, on a CUDA device only."""
    a, b = (ScaledFloat8(matrix.values[None], matrix.inverse.astype(jnp.float8_e8m0fnu)[None]) for matrix in (a, b))
    return _each(dtype)(a, b)[0]


def _each(dtype: np.dtype):
    """Builds a function that multiplies each matrix of [B, M, K] by a matrix of [B, N, K], with a rule for `jax.vmap`.

    Without the rule, `jax.nn.scaled_matmul` fails unless all of its operands have a batch axis.
    """

    @jax.custom_batching.custom_vmap
    def batched_matmul(a: ScaledFloat8, b: ScaledFloat8) -> Float[Array, "B M N"]:
        return jax.nn.scaled_matmul(a.values, b.values, a.inverse, b.inverse, preferred_element_type=dtype)

    @batched_matmul.def_vmap
    def over_a_batch(size: int, batched: Sequence[ScaledFloat8], a: ScaledFloat8, b: ScaledFloat8):
        in_a, in_b = (any(flags) for flags in batched)
        if in_a and in_b:
            a, b = (_with_batch(x, flags, size) for x, flags in ((a, batched[0]), (b, batched[1])))
            y = batched_matmul(*(ScaledFloat8(*(z.reshape(-1, *z.shape[2:]) for z in x)) for x in (a, b)))
            return y.reshape(size, -1, *y.shape[1:]), True
        # The batch becomes further rows, so that the other operand is read once.
        if in_a:
            y = batched_matmul(_as_rows(_with_batch(a, batched[0], size)), b)
            return jnp.moveaxis(y.reshape(y.shape[0], size, -1, y.shape[2]), 1, 0), True
        y = batched_matmul(a, _as_rows(_with_batch(b, batched[1], size)))
        return jnp.moveaxis(y.reshape(*y.shape[:2], size, -1), 2, 0), True

    return batched_matmul


def _with_batch(x: ScaledFloat8, batched: ScaledFloat8, size: int) -> ScaledFloat8:
    return ScaledFloat8(
        *(z if has else jnp.broadcast_to(z, (size, *z.shape)) for z, has in zip(x, batched, strict=True))
    )


def _as_rows(x: ScaledFloat8) -> ScaledFloat8:
    """Reshapes [size, B, M, K] to [B, size * M, K]."""
    return ScaledFloat8(*(jnp.moveaxis(z, 0, 1).reshape(z.shape[1], -1, z.shape[3]) for z in x))
