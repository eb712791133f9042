"""Float32 master weights for parameters stored in half precision, as an optax wrapper.

Method: Micikevicius et al., "Mixed Precision Training", 2017 (arXiv:1710.03740), section 3.1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, HALF
from mpjax.precision.stochastic_rounding import stochastic_round


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      masters: the parameters, those stored in half precision as float32 copies; None for the others.
      inner_state: the wrapped optimizer's state, as of float32 parameters.
      roundings: int32, updates so far, from which the random numbers of stochastic rounding follow; None without it.
    """

    masters: Any
    inner_state: Any
    roundings: Any = None


def master_weights(
    inner: optax.GradientTransformation, *, stochastic_rounding: bool = False, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Lets `inner` update float32 copies of the half-precision parameters, which then follow the copies.

    An update too small for the stored dtype is kept in the copy and shows once enough of them add up. Put it inside the
    loss scaling: `dynamic_loss_scaling(master_weights(optax.adamw(1e-3)))`. Parameters that are not half precision are
    updated as without it. Under `optax.apply_updates` a half-precision parameter becomes its copy, rounded.

    Args:
      inner: the optimizer (chain).
      stochastic_rounding: round a parameter whose copy moved to one of the two half-precision numbers around it, the
        nearer the likelier, so that it equals its copy in the mean; by default to the nearest.
      seed: of those random numbers; they differ from update to update.

    Raises:
      UsageError: updated without parameters.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params) -> MasterWeightsState:
        masters = jax.tree.map(lambda p: p.astype(FLOAT32) if p.dtype in HALF else None, params)
        roundings = jnp.zeros((), jnp.int32) if stochastic_rounding else None
        return MasterWeightsState(masters, inner.init(_full(masters, params)), roundings)

    def update(updates, state, params=None, **extra):
        if params is None:
            raise UsageError("master_weights needs the parameters: tx.update(grads, opt_state, params)")
        full = _full(state.masters, params)
        updates = jax.tree.map(lambda g: g.astype(FLOAT32) if g.dtype in HALF else g, updates)
        updates, inner_state = inner.update(updates, state.inner_state, full, **extra)
        moved = optax.apply_updates(full, updates)
        masters = jax.tree.map(lambda p, new: new if p.dtype in HALF else None, params, moved)
        if state.roundings is None:
            rounded = jax.tree.map(lambda p, new: new.astype(p.dtype), params, moved)
            roundings = None
        else:
            rounded = _rounded_by_chance(params, full, moved, jax.random.fold_in(jax.random.key(seed), state.roundings))
            roundings = state.roundings + 1
        followed = jax.tree.map(_step_to, params, rounded, updates)
        return followed, MasterWeightsState(masters, inner_state, roundings)

    return optax.GradientTransformationExtraArgs(init, update)


def _full(masters, params):
    """The parameters with the masters in place of those stored in half precision."""
    return jax.tree.map(lambda m, p: p if m is None else m, masters, params, is_leaf=lambda node: node is None)


def _rounded_by_chance(params, before, after, key: jax.Array):
    """The masters `after` in the parameters' dtypes; what did not move since `before` stays as it is."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.tree.unflatten(treedef, list(jax.random.split(key, len(leaves))) if leaves else [])

    def one(param, old, new, key):
        if param.dtype not in HALF:
            return new
        return jnp.where(new == old, param, stochastic_round(new, param.dtype, key))

    return jax.tree.map(one, params, before, after, keys)


def _step_to(param: jax.Array, target: jax.Array, update: jax.Array) -> jax.Array:
    """The update under which `param` becomes `target`; `update` itself where it is not stored in half."""
    return target.astype(FLOAT32) - param.astype(FLOAT32) if param.dtype in HALF else update
