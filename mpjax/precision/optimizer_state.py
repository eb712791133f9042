"""The state of an optimizer that gets float32 gradients, whatever the dtype of the parameters."""

from typing import Any

import jax
import optax

from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.precision.half_weights import CompensatedWeightsState
from mpjax.precision.master import MasterWeightsState


def init_in_float32(inner: optax.GradientTransformation, params: Any) -> Any:
    """Initialises an optimizer; leaves that follow the parameters' dtype (moments) become at least float32.

    The states of `master_weights` and `compensated_weights` are left alone: what is to be float32 in them is already,
    and their structure differs for float32 parameters.
    """

    def widen(leaf, like):
        return leaf.astype(like.dtype) if is_floating(leaf) else leaf

    def is_master(node) -> bool:
        return isinstance(node, MasterWeightsState | CompensatedWeightsState)

    state = inner.init(params)
    widened = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, widest(p.dtype, FLOAT32)) if is_floating(p) else p, params
    )
    wanted = jax.eval_shape(inner.init, widened)
    if jax.tree.structure(wanted, is_leaf=is_master) != jax.tree.structure(state, is_leaf=is_master):
        return state  # its structure depends on dtypes, so the inner transform handles them itself
    return jax.tree.map(widen, state, wanted, is_leaf=is_master)
