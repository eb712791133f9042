"""Delayed scaling: scales float8 operands by the largest absolute values of earlier steps, which a layer stores.

A step quantises an operand without reading it first. A value beyond the largest of the history saturates, as in
NVIDIA's TransformerEngine (`DelayedScaling`).

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
from mpjax.precision.float8.matrices import BY_ACTIVATIONS, BY_WEIGHT, FORWARD, GRADIENT, Way, derivatives, multiplied
from mpjax.precision.float8.products import as_matrices, placed, product, reverse_mode
from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.float8.scaling import ScaledFloat8, largest_of, quantise_to
from mpjax.precision.layers import changed


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


HISTORY = "amax_history"
"""The attribute of a layer with its history, float32 [3, 1 + H]: rows of activations, weight and incoming gradient.

The first column belongs to the current step, in which a layer may be called several times. The other columns belong to
earlier steps, and only these determine scales.
"""


def is_history(name: str) -> bool:
    """True if `name`, a path with `/` of an array in a training state, ends with `amax_history`."""
    return name.rpartition("/")[2] == HISTORY


def keep_history(module: Any, recipe: Recipe | None) -> None:
    """Makes a linear layer keep a history of `recipe.history` steps and scale its products by it, in place.

    A history that the layer has stays, whatever its length, and so does its mode; a new one is zeros, and the layer is
    in training mode. If `recipe` is None, removes the history and the wrapper that uses it instead.
    """
    from flax import nnx

    unwrap(module, KeepsHistory)
    if recipe is None:
        for name in (HISTORY, "use_running_average"):
            if name in vars(module):
                delattr(module, name)
        return
    kernel = module.kernel.get_value()
    plain = sum(len(size) if isinstance(size, tuple) else 1 for size in (module.in_features, module.out_features))
    shape = (*kernel.shape[: kernel.ndim - plain], 3, 1 + recipe.history)
    if getattr(module, HISTORY, None) is None:
        abstract = isinstance(kernel, jax.ShapeDtypeStruct)
        setattr(module, HISTORY, nnx.Variable(jax.ShapeDtypeStruct(shape, FLOAT32) if abstract else jnp.zeros(shape)))
    if not hasattr(module, "use_running_average"):
        module.use_running_average = False  # `model.eval()` sets it to True, as for batch norms
    wrap(module, KeepsHistory(recipe))


@dataclasses.dataclass(frozen=True)
class KeepsHistory:
    """A wrapper that scales the float8 product of a linear layer by its history, which it updates in training."""

    recipe: Recipe
    depth: ClassVar[int] = 5
    of_product: ClassVar[bool] = True

    def __call__(self, call, module, *args, **kwargs):
        """Calls a layer with a product that scales by its history.

        In training (`use_running_average` is False), also records the largest absolute values of the operands in the
        first column of the history, in place. Empty operands are not recorded.
        """
        variable = getattr(module, HISTORY)
        history = variable[...]

        def dot(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
            nonlocal history
            x, w, shape = as_matrices(lhs, rhs, dimension_numbers)
            dtype = np.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
            if not (x.size and w.size):
                y = product(x, w, self.recipe, dtype)
            else:
                y, history = reverse_mode(_by_history, self.recipe, dtype, x, w, history)
            return placed(y.reshape(shape), out_sharding)

        result = call(changed(module, dot_general=dot), *args, **kwargs)
        if not module.use_running_average:
            variable.set_value(history)
        return result


def with_gradient(history: Float[Array, "*S 3 1+H"], cotangent: Float[Array, "*S 3 1+H"]) -> Float[Array, "*S 3 1+H"]:
    """Records the largest incoming gradient of a step in its history, and shifts the history to the next step.

    Args:
      history: the history after the forward pass.
      cotangent: the derivative of the loss with respect to the history before the step; holds the largest gradient.
    """
    return end_step(add_gradient(history, cotangent))


def add_gradient(history: Float[Array, "*S 3 1+H"], cotangent: Float[Array, "*S 3 1+H"]) -> Float[Array, "*S 3 1+H"]:
    """Records the largest incoming gradient of a part of the current step, such as a micro-batch, in a history.

    Args:
      history: the history after the forward pass of that part.
      cotangent: the derivative of the loss with respect to the history before the part; holds the largest gradient.
    """
    return jnp.maximum(history, cotangent)  # the cotangent is zero outside the gradient's place


def end_step(history: Float[Array, "*S 3 1+H"]) -> Float[Array, "*S 3 1+H"]:
    """Shifts a history by one step: the current step becomes the latest earlier step, and the oldest one drops out.

    The column of the new current step is zero.
    """
    return jnp.concatenate([jnp.zeros_like(history[..., :1]), history[..., :-1]], axis=-1)


def _quantised(x: jax.Array, dtype: np.dtype, past: Float[Array, " H"]) -> ScaledFloat8:
    """Quantises to `dtype` by the largest value of earlier steps in `past`; larger values of `x` saturate.

    If all of `past` are 0, as before the first step, quantises by the largest absolute value of `x`.
    """
    largest = jnp.max(past)
    return quantise_to(x, jnp.where(largest > 0, largest, largest_of(x)), dtype)


def _multiplied(
    recipe: Recipe, way: Way, dtype: np.dtype, a: jax.Array, b: jax.Array, history: Float[Array, "3 1+H"]
) -> jax.Array:
    past = history[:, 1:]
    aq, bq = (_quantised(x, way.dtype(recipe, i), past[way.roles[i]]) for i, x in enumerate((a, b)))
    return multiplied(way, dtype, aq, bq)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_history(
    recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array, history: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Multiplies [M, K] by [K, N]; returns the result, and the history with the largest values of both operands.

    The derivative with respect to `history` holds the largest incoming gradient of this call and of later calls that
    take the returned history. The backward pass thus covers every call of a layer.
    """
    largest = jnp.stack([largest_of(x), largest_of(w), jnp.zeros((), FLOAT32)])[:, None]
    after = jnp.concatenate([jnp.maximum(history[:, :1], largest), history[:, 1:]], axis=1)
    return _multiplied(recipe, FORWARD, dtype, x, w, history), after


def _forward(recipe: Recipe, dtype: np.dtype, x: jax.Array, w: jax.Array, history: jax.Array):
    return _by_history(recipe, dtype, x, w, history), (x, w, history)


def _backward(recipe: Recipe, dtype: np.dtype, kept: tuple[jax.Array, jax.Array, jax.Array], cotangents):
    del dtype
    (x, w, history), (g, later) = kept, cotangents
    dx = _once(recipe, BY_ACTIVATIONS, x.dtype, g, w, history)
    dw = _once(recipe, BY_WEIGHT, w.dtype, x, g, history)
    return dx, dw, _of_gradient(history, jnp.maximum(largest_of(g), later[GRADIENT, 0]))


_by_history.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _once(recipe: Recipe, way: Way, dtype: np.dtype, a: jax.Array, b: jax.Array, history: jax.Array) -> jax.Array:
    """Multiplies two matrices in float8 with scales from a history, which does not change.

    Its derivatives, the second derivatives of a layer, are not in float8.
    """
    return _multiplied(recipe, way, dtype, a, b, history)


def _once_forward(recipe: Recipe, way: Way, dtype: np.dtype, a: jax.Array, b: jax.Array, history: jax.Array):
    return _once(recipe, way, dtype, a, b, history), (a, b, history)


def _once_backward(recipe: Recipe, way: Way, dtype: np.dtype, kept: tuple[jax.Array, jax.Array, jax.Array], u):
    a, b, history = kept
    # A gradient inside the loss, as in a gradient penalty, is an incoming gradient too, and may be the largest.
    inner = (a, b)[way.roles.index(GRADIENT)]
    da, db = derivatives(way, dtype, a, b, u)
    return da, db, _of_gradient(history, largest_of(inner))


_once.defvjp(_once_forward, _once_backward)


def _of_gradient(history: jax.Array, largest: jax.Array) -> jax.Array:
    """The derivative with respect to a history: `largest` at the gradient of the current step, zeros elsewhere.

    No derivative flows through `largest`, the largest absolute value of the incoming gradient.
    """
    mask = np.zeros(history.shape, FLOAT32)
    mask[GRADIENT, 0] = 1
    return jax.lax.stop_gradient(largest) * mask
