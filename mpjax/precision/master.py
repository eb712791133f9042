"""Float32 master weights for parameters stored in half precision, as an optax wrapper.

Method: Micikevicius et al., "Mixed Precision Training", 2017 (arXiv:1710.03740), section 3.1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import BFLOAT16, FLOAT32, HALF, in_float32
from mpjax.precision.stochastic_rounding import stochastic_round
from mpjax.precision.updates import moved_by


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      masters: float32 copies of the half-precision parameters; None for other parameters.
      inner_state: the wrapped optimizer's state, for float32 parameters.
      roundings: int32, the number of updates so far, a seed of stochastic rounding; None without stochastic rounding.
    """

    masters: Any
    inner_state: Any
    roundings: Any = None


def master_weights(
    inner: optax.GradientTransformation, *, stochastic_rounding: bool = False, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it updates float32 copies of the half-precision parameters.

    `optax.apply_updates` then sets each half-precision parameter to its rounded copy. Updates too small for the stored
    dtype add up in the copy until they change the parameter. A parameter that is set to another value replaces its
    copy. Parameters in other dtypes are updated as without the wrapper. Put it inside the loss scaling:
    `dynamic_loss_scaling(master_weights(optax.adamw(1e-3)))`.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> params, tx = jnp.bfloat16(1), mpjax.master_weights(optax.sgd(2**-10))
    >>> updates, state = tx.update(jnp.bfloat16(1), tx.init(params), params)
    >>> float(optax.apply_updates(params, updates)), float(state.masters)
    (1.0, 0.9990234375)

    Args:
      inner: the optimizer (chain).
      stochastic_rounding: if True, rounds a changed copy at random to one of its two neighbours in half precision. The
        nearer neighbour is more likely, so that the mean is the copy. By default, rounds to the nearest.
      seed: the seed of the random numbers, which differ from update to update.

    Raises:
      UsageError: `update` was called without parameters.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params) -> MasterWeightsState:
        masters = jax.tree.map(lambda p: p.astype(FLOAT32) if p.dtype in HALF else None, params)
        roundings = jnp.zeros((), jnp.int32) if stochastic_rounding else None
        return MasterWeightsState(masters, inner.init(_full(masters, params)), roundings)

    def update(updates, state, params=None, **extra):
        if params is None:
            raise UsageError("master_weights needs the parameters: tx.update(grads, opt_state, params)")
        chance = state.roundings is not None
        masters = jax.tree.map(lambda p, m: m if m is None else _current(m, p, chance), params, state.masters)
        full = _full(masters, params)
        updates, inner_state = inner.update(in_float32(updates), state.inner_state, full, **extra)
        moved = moved_by(updates, full)
        masters = jax.tree.map(lambda p, new: new if p.dtype in HALF else None, params, moved)
        if state.roundings is None:
            rounded = jax.tree.map(lambda p, new: new.astype(p.dtype), params, moved)
            roundings = None
        else:
            rounded = _rounded_by_chance(params, full, moved, jax.random.fold_in(jax.random.key(seed), state.roundings))
            roundings = state.roundings + 1
        followed = jax.tree.map(step_to, params, rounded, updates)
        return followed, MasterWeightsState(masters, inner_state, roundings)

    return optax.GradientTransformationExtraArgs(init, update)


def _full(masters, params):
    """Replaces half-precision parameters by their float32 masters; other parameters stay."""
    return jax.tree.map(lambda m, p: p if m is None else m, masters, params, is_leaf=lambda node: node is None)


def _current(master: jax.Array, param: jax.Array, chance: bool) -> jax.Array:
    """Replaces a float32 master by the parameter, element by element, where it does not round to the parameter.

    There the user has set the parameter to another value. With `chance`, after stochastic rounding, the parameter may
    also be the farther of the master's two neighbours in half precision.
    """
    value = param.astype(FLOAT32)
    rounds = nearest(master, param.dtype) == value
    if chance:
        beyond = jnp.nextafter(param, jnp.where(master > value, jnp.inf, -jnp.inf).astype(param.dtype)).astype(FLOAT32)
        rounds |= (jnp.minimum(value, beyond) < master) & (master < jnp.maximum(value, beyond))
    return jnp.where(rounds, master, value)


def nearest(values: jax.Array, dtype) -> jax.Array:
    """Rounds float32 values to the nearest numbers of float16 or bfloat16; the result is in float32.

    XLA may remove a plain cast to half precision and back, which would skip the rounding.
    """
    if dtype == BFLOAT16:  # fuses with the update; float16 would lose its subnormal numbers
        return jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return jax.lax.optimization_barrier(values.astype(dtype)).astype(FLOAT32)


def _rounded_by_chance(params, before, after, key: jax.Array):
    """Rounds the float32 masters `after` an update stochastically to the dtypes of their parameters.

    A parameter keeps its bits where its master is the same as `before` the update. Parameters that are not in half
    precision are taken from `after` as they are.
    """
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.tree.unflatten(treedef, list(jax.random.split(key, len(leaves))) if leaves else [])

    def one(param, old, new, key):
        if param.dtype not in HALF:
            return new
        return jnp.where(new == old, param, stochastic_round(new, param.dtype, key))

    return jax.tree.map(one, params, before, after, keys)


def step_to(param: jax.Array, target: jax.Array, update: jax.Array) -> jax.Array:
    """Computes the float32 update that turns a half-precision `param` into `target` when `optax.apply_updates` adds it.

    It is their difference, rounded to float32. The sum is exactly `target`, except for the sign of a zero, unless
    `target` is over 2^13 times smaller than `param` (bfloat16: 2^16). An infinite `param` with another target becomes
    NaN. The update is -0.0 where `param` equals `target`: added to `param`, which may be -0.0 or inf, it keeps every
    bit. For a parameter that is not in half precision, returns the given `update`.
    """
    if param.dtype not in HALF:
        return update
    before, after = param.astype(FLOAT32), target.astype(FLOAT32)
    return jnp.where(before == after, jnp.float32(-0.0), after - before)
