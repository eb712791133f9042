"""Products in float8, with derivatives whose products are in float8 too.

XLA gets operands in float8, not quantised and cast back. Only then does it pass them to cuBLASLt and Triton in float8.
The inverse scales are multiplied into the result, which cuBLASLt does as part of the product.

Shapes: M rows of activations (batch times positions), K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.errors import UsageError
from mpjax.precision.float8.matrices import (
    BY_ACTIVATIONS,
    BY_WEIGHT,
    FORWARD,
    UNKNOWN,
    Largest,
    Way,
    derivatives,
    in_float8,
)
from mpjax.precision.float8.recipes import Recipe


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Float8Dot:
    """A `dot_general` for Flax layers that quantises both operands to float8 with a recipe and multiplies them.

    Attributes:
      recipe: the recipe.
      largest: the largest absolute values of operands where they are known already, for a recipe with one scale for
        each whole operand.
    """

    recipe: Recipe
    largest: Largest = UNKNOWN

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiplies activations by a weight, with the signature of `jax.lax.dot_general`.

        With batch axes, or operands that are not floating, it calls `jax.lax.dot_general` instead. Only then does it
        use `precision`.
        """
        if any(dimension_numbers[1]) or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)):
            operands = (lhs, rhs, dimension_numbers, precision, preferred_element_type)
            return lax.dot_general(*operands, out_sharding=out_sharding)
        x, w, shape = as_matrices(lhs, rhs, dimension_numbers)
        dtype = np.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
        return placed(product(x, w, self.recipe, dtype, self.largest).reshape(shape), out_sharding)


def product(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"],
    recipe: Recipe,
    dtype: np.dtype,
    largest: Largest = UNKNOWN,
) -> Float[Array, "M N"]:
    """Multiplies two matrices in float8 with a recipe, forward and backward.

    Second derivatives are right too; their products are in the dtype of the operands. Outside `jax.jit`, forward-mode
    derivatives raise UsageError. Empty operands are multiplied without float8.

    Args:
      x: activations, bfloat16 or float32.
      w: a weight, bfloat16 or float32.
      recipe: the recipe; a delayed recipe uses the present values here.
      dtype: the dtype of the result; sums are in float32.
      largest: the largest absolute values of operands where they are known already, for a recipe with one scale for
        each whole operand.
    """
    if not (x.size and w.size):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
    return reverse_mode(_product, recipe, dtype, x, w, largest)


def reverse_mode(multiply: Callable, *arguments: Any) -> Any:
    """Calls `multiply(*arguments)`, a function with reverse-mode derivatives only, and explains forward-mode errors.

    Raises:
      UsageError: the call is differentiated in forward mode. Within `jax.jit`, JAX raises its own error instead, when
        it compiles.
    """
    try:
        return multiply(*arguments)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise UsageError(
            "products in float8 have no derivatives in forward mode (jax.jvp, jax.jacfwd, jax.hessian): write "
            "jax.grad, jax.vjp or jax.jacrev, as in jax.jacrev(jax.grad(f)) for a Hessian, or policy='mixed_bfloat16'"
        ) from error


def as_matrices(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> tuple[jax.Array, jax.Array, list[int]]:
    """Transposes and reshapes the operands of a `dot_general` without batch axes to matrices [M, K] and [K, N].

    Also returns the shape of the product, to which its matrix [M, N] is to be reshaped.
    """
    (of_lhs, of_rhs), _ = dimension_numbers
    kept_lhs, kept_rhs = _others(lhs.ndim, of_lhs), _others(rhs.ndim, of_rhs)
    shape = [lhs.shape[axis] for axis in kept_lhs] + [rhs.shape[axis] for axis in kept_rhs]
    return _matrix(lhs, kept_lhs, of_lhs), _matrix(rhs, of_rhs, kept_rhs), shape


def placed(result: jax.Array, out_sharding: Any) -> jax.Array:
    """Shards the result of a product by `out_sharding`, on a mesh with explicit axes; None changes nothing."""
    return result if out_sharding is None else jax.sharding.reshard(result, out_sharding)


def _others(rank: int, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis not in {a % rank for a in axes})


def _matrix(x: jax.Array, rows: Sequence[int], columns: Sequence[int]) -> jax.Array:
    """Transposes and reshapes an array to a matrix, whose rows run over the axes `rows` and columns over `columns`."""
    sizes = (math.prod(x.shape[axis] for axis in axes) for axes in (rows, columns))
    return jnp.transpose(x, (*rows, *columns)).reshape(tuple(sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array, largest: Largest) -> jax.Array:
    """Multiplies [M, K] by [K, N] in float8; its derivatives are products in float8 too."""
    return in_float8(recipe, FORWARD, dtype, x, w, largest)


def _forward(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array, largest: Largest):
    # XLA quantises equal arrays once. Residuals must not be in float8: `jax.checkpoint` rounds residuals to their bits
    # of exponent and mantissa. Numbers of 256 and more then become NaN: e4m3fn has them, the IEEE format does not.
    return _product(recipe, dtype, x, w, largest), (x, w, largest)


def _backward(recipe: Recipe, dtype: np.dtype, kept: tuple[jax.Array, jax.Array, Largest], g: jax.Array):
    del dtype
    x, w, largest = kept
    dx, dw = gradients(x, w, g, recipe, largest)
    return dx, dw, _zeros(largest)


_product.defvjp(_forward, _backward)


def gradients(
    x: Float[Array, "M K"], w: Float[Array, "K N"], g: Float[Array, "M N"], recipe: Recipe, largest: Largest = UNKNOWN
) -> tuple[Float[Array, "M K"], Float[Array, "K N"]]:
    """Computes the gradients (dx, dw) of the operands of x @ w from the gradient g of the result, by float8 products.

    Each has the dtype of its operand. `largest` has the largest absolute values that are known already.
    """
    dx = _once(recipe, BY_ACTIVATIONS, x.dtype, g, w, largest)
    return dx, _once(recipe, BY_WEIGHT, w.dtype, x, g, largest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _once(recipe: Recipe, way: Way, dtype: np.dtype, a: jax.Array, b: jax.Array, largest: Largest) -> jax.Array:
    """Multiplies two matrices in float8. Its derivatives, the second derivatives of a layer, are not in float8.

    Without its own rule, JAX would cast the gradient of a float8 operand to float8, unscaled.
    """
    return in_float8(recipe, way, dtype, a, b, largest)


def _once_forward(recipe: Recipe, way: Way, dtype: np.dtype, a: jax.Array, b: jax.Array, largest: Largest):
    return _once(recipe, way, dtype, a, b, largest), (a, b, largest)


def _once_backward(recipe: Recipe, way: Way, dtype: np.dtype, kept: tuple[jax.Array, jax.Array, Largest], u: jax.Array):
    del recipe
    a, b, largest = kept
    return *derivatives(way, dtype, a, b, u), _zeros(largest)


_once.defvjp(_once_forward, _once_backward)


def _zeros(largest: Largest) -> Largest:
    """Makes zeros as the gradients of the largest values, through which no gradient flows."""
    return jax.tree.map(jnp.zeros_like, largest)
