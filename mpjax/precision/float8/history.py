"""Delayed scaling: scales from the largest absolute values of the steps before, which are state of a layer.

The present step need not look at an operand before it quantises it. A value beyond the largest of the history
saturates, as in NVIDIA's TransformerEngine (`DelayedScaling`).

Shapes: M rows of activations, K inputs, N outputs, H steps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.calls import unwrap, wrap
from mpjax.precision.dtypes import FLOAT32
from mpjax.precision.float8.products import as_matrices, multiplied
from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.float8.scaling import Quantised, largest_of, quantise_to
from mpjax.precision.layers import changed


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


HISTORY = "amax_history"
"""The attribute of a layer with its history, float32 [3, H]: of activations, weight and incoming gradient."""

_GRADIENT = 2


def is_history(name: str) -> bool:
    """Returns True if an array of a training state, by path, is a history."""
    return name.rpartition("/")[2] == HISTORY


def keep_history(module: Any, recipe: Recipe | None) -> None:
    """Makes a linear layer keep a history and multiply by it, or drop it without a recipe, in place."""
    from flax import nnx

    unwrap(module, KeepsHistory)
    if recipe is None:
        for name in (HISTORY, "use_running_average"):
            if name in vars(module):
                delattr(module, name)
        return
    kernel = module.kernel.get_value()
    plain = sum(len(size) if isinstance(size, tuple) else 1 for size in (module.in_features, module.out_features))
    shape = (*kernel.shape[: kernel.ndim - plain], 3, recipe.history)
    if getattr(module, HISTORY, None) is None:
        abstract = isinstance(kernel, jax.ShapeDtypeStruct)
        setattr(module, HISTORY, nnx.Variable(jax.ShapeDtypeStruct(shape, FLOAT32) if abstract else jnp.zeros(shape)))
    module.use_running_average = False  # which `model.eval()` makes True, as for batch norms
    wrap(module, KeepsHistory(recipe))


@dataclasses.dataclass(frozen=True)
class KeepsHistory:
    """A wrapper for a linear layer that multiplies by its history, and adds to it in training."""

    recipe: Recipe
    depth: ClassVar[int] = 5

    def __call__(self, call, module, *args, **kwargs):
        """Calls a layer with a product that reads its history."""
        variable = getattr(module, HISTORY)
        seen: list[jax.Array] = []

        def dot(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
            x, w, shape = as_matrices(lhs, rhs, dimension_numbers)
            dtype = np.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
            seen.extend(jax.lax.stop_gradient(largest_of(each)) for each in (x, w))
            product: Any = _by_history(self.recipe, dtype, x, w, variable[...])
            return product.reshape(shape)

        result = call(changed(module, dot_general=dot), *args, **kwargs)
        if not module.use_running_average:
            newest = jnp.stack([*seen, jnp.zeros((), FLOAT32)])[:, None]
            variable.set_value(jnp.concatenate([newest, jax.lax.stop_gradient(variable[...])[:, :-1]], axis=1))
        return result


def with_gradient(history: Float[Array, "*S 3 H"], cotangent: Float[Array, "*S 3 H"]) -> Float[Array, "*S 3 H"]:
    """Returns a history after a step, with the largest incoming gradient.

    Args:
      history: what the forward pass made of it.
      cotangent: the derivative of the loss with respect to the history before, which stands for that number.
    """
    return history.at[..., _GRADIENT, 0].set(cotangent[..., _GRADIENT, 0])


def _quantised(x: jax.Array, dtype: np.dtype, past: Float[Array, " H"]) -> Quantised:
    """Quantises by the largest of the past, or of the present in a layer's first step."""
    largest = jnp.max(past)
    return quantise_to(x, jnp.where(largest > 0, largest, largest_of(x)), dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_history(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array, history: jax.Array) -> jax.Array:
    """Multiplies [M, K] by [K, N]; the derivative by `history` holds the largest incoming gradient."""
    return _forward(recipe, dtype, x, w, history)[0]


def _forward(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array, history: jax.Array):
    xq, wq = _operands(recipe, x, w, history)
    return multiplied(xq, wq, (1, 0), dtype, exact=False), (x, w, history)


def _backward(recipe: Recipe, dtype: np.dtype, kept: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array):
    del dtype
    x, w, history = kept
    xq, wq = _operands(recipe, x, w, history)
    gq = _quantised(g, recipe.gradient, history[_GRADIENT])
    dx = multiplied(gq, wq, (1, 1), x.dtype, exact=True)
    dw = multiplied(xq, gq, (0, 0), w.dtype, exact=True)
    return dx, dw, jnp.zeros_like(history).at[_GRADIENT, 0].set(largest_of(g))


def _operands(recipe: Recipe, x: jax.Array, w: jax.Array, history: jax.Array) -> tuple[Quantised, Quantised]:
    return _quantised(x, recipe.forward, history[0]), _quantised(w, recipe.forward, history[1])


_by_history.defvjp(_forward, _backward)
