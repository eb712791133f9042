"""Products in float8, with derivatives whose products are in float8 too.

Operands are given to XLA in float8, not quantised and cast back: only so does it keep them for cuBLASLt and Triton. The
inverse scales are multiplied into the result, which cuBLASLt does as part of the product.

Shapes: M rows of activations (batch times positions), K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.float8.scaling import BLOCK, Quantised, quantise, quantise_blocks


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Float8Dot:
    """A `dot_general` for Flax layers: quantises both operands by a recipe, and multiplies them.

    Attributes:
      recipe: the recipe.
    """

    recipe: Recipe

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiplies activations by a weight; other arguments are those of `jax.lax.dot_general`.

        A product with batch axes, or of operands that are not floating, is that of `jax.lax.dot_general`.
        """
        if any(dimension_numbers[1]) or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)):
            return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
        x, w, shape = as_matrices(lhs, rhs, dimension_numbers)
        dtype = np.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
        return product(x, w, self.recipe, dtype).reshape(shape)


def product(x: Float[Array, "M K"], w: Float[Array, "K N"], recipe: Recipe, dtype: np.dtype) -> Float[Array, "M N"]:
    """Multiplies two matrices as a recipe says, forward and backward.

    Args:
      x: activations, bfloat16 or float32.
      w: a weight, likewise.
      recipe: the recipe.
      dtype: the dtype of the result; sums are in float32.
    """
    # A delayed recipe without a history has the present to go by.
    return (_by_block if recipe.scaling == "block" else _by_scale)(recipe, dtype, x, w)


def as_matrices(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> tuple[jax.Array, jax.Array, list[int]]:
    """Returns the operands of a product without batch axes as [M, K] and [K, N], and the shape of its result."""
    (of_lhs, of_rhs), _ = dimension_numbers
    kept_lhs, kept_rhs = _others(lhs.ndim, of_lhs), _others(rhs.ndim, of_rhs)
    shape = [lhs.shape[axis] for axis in kept_lhs] + [rhs.shape[axis] for axis in kept_rhs]
    return _matrix(lhs, kept_lhs, of_lhs), _matrix(rhs, of_rhs, kept_rhs), shape


def _others(rank: int, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis not in {each % rank for each in axes})


def _matrix(x: jax.Array, rows: Sequence[int], columns: Sequence[int]) -> jax.Array:
    """Returns a matrix of an array whose axes are rows or columns, in the given order."""
    sizes = (math.prod(x.shape[axis] for axis in axes) for axes in (rows, columns))
    return jnp.transpose(x, (*rows, *columns)).reshape(tuple(sizes))


def multiplied(a: Quantised, b: Quantised, axes: tuple[int, int], dtype: np.dtype, *, exact: bool) -> jax.Array:
    """Multiplies two matrices that are added up over one axis each.

    Args:
      a: one.
      b: the other.
      axes: the axis of each that is added up.
      dtype: the dtype of the result.
      exact: whether all sums are in float32. On Hopper, cuBLASLt's fast sums have fewer bits: good enough for a
        forward pass (NVIDIA, TransformerEngine, "split accumulator").
    """
    precision = lax.Precision.HIGHEST if exact else None
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    y = lax.dot_general(a.values, b.values, numbers, precision=precision, preferred_element_type=dtype)
    if not a.inverse.ndim:
        return y * (a.inverse * b.inverse).astype(dtype)
    rows = a.inverse.reshape(-1, 1)
    return y * rows.astype(dtype) * b.inverse.reshape(1, -1).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_scale(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies [M, K] by [K, N] with a scale for each operand, or for each of its rows that is not added up."""
    return _by_scale_forward(recipe, dtype, x, w)[0]


def _by_scale_forward(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array):
    y = multiplied(_scaled(recipe, x, 1), _scaled(recipe, w, 0), (1, 0), dtype, exact=False)
    # XLA quantises equal arrays once. Float8 arrays must not be kept: `jax.checkpoint` rounds what it keeps to as many
    # bits of exponent and mantissa, which makes NaN of 256 and more: e4m3fn has these numbers, IEEE's form has not.
    return y, (x, w)


def _by_scale_backward(recipe: Recipe, dtype: np.dtype, kept: tuple[jax.Array, jax.Array], g: jax.Array):
    del dtype
    x, w = kept
    dx = multiplied(_scaled(recipe, g, 1, gradient=True), _scaled(recipe, w, 1), (1, 1), x.dtype, exact=True)
    dw = multiplied(_scaled(recipe, x, 0), _scaled(recipe, g, 0, gradient=True), (0, 0), w.dtype, exact=True)
    return dx, dw


_by_scale.defvjp(_by_scale_forward, _by_scale_backward)


def _scaled(recipe: Recipe, x: jax.Array, axis: int, *, gradient: bool = False) -> Quantised:
    """Quantises a matrix that is added up along an axis."""
    return quantise(x, recipe.gradient if gradient else recipe.forward, axis if recipe.scaling == "row" else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_block(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array) -> jax.Array:
    return _by_block_forward(recipe, dtype, x, w)[0]


def _by_block_forward(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array):
    return _of_blocks(quantise_blocks(x, recipe.forward), quantise_blocks(w.T, recipe.forward), dtype), (x, w)


def _by_block_backward(recipe: Recipe, dtype: np.dtype, kept: tuple[jax.Array, jax.Array], g: jax.Array):
    del dtype
    x, w = kept
    dx = _of_blocks(quantise_blocks(g, recipe.gradient), quantise_blocks(w, recipe.forward), x.dtype)
    dw = _of_blocks(quantise_blocks(x.T, recipe.forward), quantise_blocks(g.T, recipe.gradient), w.dtype)
    return dx, dw


_by_block.defvjp(_by_block_forward, _by_block_backward)


def _of_blocks(a: Quantised, b: Quantised, dtype: np.dtype) -> jax.Array:
    """Multiplies two matrices in blocks that are added up over their last axes; on a CPU, blocks are multiplied out."""

    def by_blocks(a: Quantised, b: Quantised) -> jax.Array:
        scales = (each.inverse.astype(jnp.float8_e8m0fnu)[None] for each in (a, b))
        return jax.nn.scaled_matmul(a.values[None], b.values[None], *scales, preferred_element_type=dtype)[0]

    def float8_blocks_multiplied_out(a: Quantised, b: Quantised) -> jax.Array:
        x, w = (each.values.astype(dtype) * jnp.repeat(each.inverse.astype(dtype), BLOCK, 1) for each in (a, b))
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)

    return lax.platform_dependent(a, b, cuda=by_blocks, default=jax.jit(float8_blocks_multiplied_out))
