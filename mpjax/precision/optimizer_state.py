"""Passes parameters to optimizers in float32, like gradients, for every dtype in which parameters are stored.

Optimizer state then has one structure. An optimizer that distinguishes dtypes, such as `master_weights`, sees the
stored parameters.
"""

from typing import Any

import jax
import optax

from mpjax.precision.dtypes import in_float32, is_floating
from mpjax.precision.half_weights import CompensatedWeightsState, StochasticWeightsState
from mpjax.precision.master import MasterWeightsState


def parameters_seen(inner: optax.GradientTransformation, params: Any) -> Any:
    """Casts half-precision parameters to float32 for an optimizer, unless the optimizer distinguishes dtypes.

    An optimizer distinguishes dtypes if its state has another structure for float32 parameters, or contains the state
    of `master_weights`, `compensated_weights` or `stochastic_weights`. It then gets the parameters as they are stored.
    """
    float32_params = in_float32(params)
    if all(a is b for a, b in zip(jax.tree.leaves(float32_params), jax.tree.leaves(params), strict=True)):
        return params
    state = jax.eval_shape(inner.init, params)
    differs = jax.tree.structure(state) != jax.tree.structure(jax.eval_shape(inner.init, float32_params))
    return params if differs or any(map(_stores_half, jax.tree.leaves(state, is_leaf=_stores_half))) else float32_params


def init_in_float32(inner: optax.GradientTransformation, params: Any) -> Any:
    """Initialises the state of an optimizer; its floating arrays get the dtypes that they have for float32 parameters.

    So moments are in float32 or wider. The states of `master_weights`, `compensated_weights` and `stochastic_weights`
    stay as they are. So does the whole state if its structure differs for float32 parameters.
    """
    state = inner.init(parameters_seen(inner, params))
    float32_state = jax.eval_shape(lambda: inner.init(in_float32(params)))
    if jax.tree.structure(float32_state, is_leaf=_stores_half) != jax.tree.structure(state, is_leaf=_stores_half):
        return state  # its structure depends on dtypes, so the inner transform handles dtypes itself

    def as_like(leaf: Any, like: Any) -> Any:
        return leaf.astype(like.dtype) if is_floating(leaf) else leaf

    return jax.tree.map(as_like, state, float32_state, is_leaf=_stores_half)


def _stores_half(node: Any) -> bool:
    return isinstance(node, MasterWeightsState | CompensatedWeightsState | StochasticWeightsState)
