"""Float32 master weights for parameters stored in half precision, as an optax wrapper.

Method: Micikevicius et al., "Mixed Precision Training", 2017 (arXiv:1710.03740), section 3.1.
"""

from typing import Any, NamedTuple

import jax
import optax

from mpjax.precision.dtypes import FLOAT32, HALF


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      masters: the parameters, those stored in half precision as float32 copies; None for the others.
      inner_state: the wrapped optimizer's state, as of float32 parameters.
    """

    masters: Any
    inner_state: Any


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets `inner` update float32 copies of the half-precision parameters, which then follow the copies.

    An update too small for the stored dtype is kept in the copy and shows once enough of them add up. Put it inside the
    loss scaling: `dynamic_loss_scaling(master_weights(optax.adamw(1e-3)))`. Parameters that are not half precision are
    updated as without it. Under `optax.apply_updates` a half-precision parameter becomes its copy, rounded.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params) -> MasterWeightsState:
        masters = jax.tree.map(lambda p: p.astype(FLOAT32) if p.dtype in HALF else None, params)
        return MasterWeightsState(masters, inner.init(_full(masters, params)))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("master_weights needs the parameters: tx.update(grads, opt_state, params)")
        full = _full(state.masters, params)
        updates = jax.tree.map(lambda g: g.astype(FLOAT32) if g.dtype in HALF else g, updates)
        updates, inner_state = inner.update(updates, state.inner_state, full, **extra)
        moved = optax.apply_updates(full, updates)
        masters = jax.tree.map(lambda p, new: new if p.dtype in HALF else None, params, moved)
        return jax.tree.map(_follow, params, moved, updates), MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _full(masters, params):
    """The parameters with the masters in place of those stored in half precision."""
    return jax.tree.map(lambda m, p: p if m is None else m, masters, params, is_leaf=lambda node: node is None)


def _follow(param: jax.Array, moved: jax.Array, update: jax.Array) -> jax.Array:
    if param.dtype not in HALF:
        return update
    return moved.astype(param.dtype).astype(FLOAT32) - param.astype(FLOAT32)
