"""Half-precision parameters without float32 copies, as optax wrappers: rounded stochastically, or with a compensation.

Both keep an update that is smaller than the distance between two numbers of the parameters' dtype. Stochastic rounding
keeps it in the mean (Gupta et al., 2015, arXiv:1502.02551, section 3). Compensation keeps the rounding error in a
second number of the same dtype (Kahan, 1965; Yu et al., "Collage: Light-Weight Low-Precision Strategy for LLM
Training", 2024, arXiv:2405.03637, "Collage-light").
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import BFLOAT16, FLOAT32, HALF, in_float32
from mpjax.precision.master import nearest, step_to
from mpjax.precision.stochastic_rounding import seed_of, stochastic_bfloat16, stochastic_round
from mpjax.precision.updates import moved_by


class StochasticWeightsState(NamedTuple):
    """The state of `stochastic_weights`.

    Attributes:
      roundings: int32, the number of updates so far, a seed of the rounding.
      inner_state: the wrapped optimizer's state, for float32 parameters.
    """

    roundings: jax.Array
    inner_state: Any


class CompensatedWeightsState(NamedTuple):
    """The state of `compensated_weights`.

    Attributes:
      compensation: the remainder of rounding for each half-precision parameter, in its dtype; None for other
        parameters.
      inner_state: the wrapped optimizer's state, for float32 parameters.
    """

    compensation: Any
    inner_state: Any


def stochastic_weights(inner: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that half-precision parameters take its float32 updates by stochastic rounding.

    There is no float32 copy. A parameter plus its update rounds at random to one of the two neighbours in its dtype.
    The nearer neighbour is more likely, so that the mean is exact. The updates are float32 differences to the rounded
    parameters: pass them to `optax.apply_updates`. A parameter without an update keeps every bit. Parameters in other
    dtypes are updated as without the wrapper. Put it inside the loss scaling:
    `no_loss_scaling(stochastic_weights(optax.adamw(1e-3)))`.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> params, tx = jnp.ones(10_000, jnp.bfloat16), mpjax.precision.stochastic_weights(optax.sgd(2**-10))
    >>> updates, _ = tx.update(jnp.ones_like(params), tx.init(params), params)
    >>> round(float(jnp.mean(optax.apply_updates(params, updates).astype(jnp.float32))), 3)
    0.999

    Args:
      inner: the optimizer (chain), which sees float32 parameters and gradients.
      seed: the seed of the random numbers, which differ from parameter to parameter and from update to update.

    Raises:
      UsageError: `update` was called without parameters.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params) -> StochasticWeightsState:
        return StochasticWeightsState(jnp.zeros((), jnp.int32), inner.init(in_float32(params)))

    def update(updates, state, params=None, **extra):
        full = in_float32(_given(params))
        updates, inner_state = inner.update(in_float32(updates), state.inner_state, full, **extra)
        moved = moved_by(updates, full)
        leaves, treedef = jax.tree.flatten(params)
        seeds = treedef.unflatten(seed_of(seed, state.roundings, number) for number in range(len(leaves)))
        rounded = jax.tree.map(_rounded, params, full, moved, seeds)
        followed = jax.tree.map(step_to, params, rounded, updates)
        return followed, StochasticWeightsState(state.roundings + 1, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def compensated_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that each half-precision parameter keeps its rounding error in a second array of its dtype.

    The optimizer sees the sum of a parameter and its compensation in float32: 16 bits of mantissa for bfloat16, at half
    the memory of float32 copies. The updates are float32 differences to the rounded parameters: pass them to
    `optax.apply_updates`. A compensation is dropped if the parameter was set to
    another value, from which the sum would not round back to it. Parameters in other dtypes
    are updated as without the wrapper. Put it inside the loss scaling.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> params, tx = jnp.bfloat16(1), mpjax.precision.compensated_weights(optax.sgd(2**-10))
    >>> updates, state = tx.update(jnp.bfloat16(1), tx.init(params), params)
    >>> float(optax.apply_updates(params, updates)), float(state.compensation)
    (1.0, -0.0009765625)

    Args:
      inner: the optimizer (chain), which sees float32 parameters and gradients.

    Raises:
      UsageError: `update` was called without parameters.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params) -> CompensatedWeightsState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p) if p.dtype in HALF else None, params)
        return CompensatedWeightsState(zeros, inner.init(in_float32(params)))

    def update(updates, state, params=None, **extra):
        full = jax.tree.map(_sum, _given(params), state.compensation, is_leaf=_is_none)
        updates, inner_state = inner.update(in_float32(updates), state.inner_state, full, **extra)
        moved = moved_by(updates, full)
        kept = jax.tree.map(lambda p, new: nearest(new, p.dtype) if p.dtype in HALF else new, params, moved)
        rest = jax.tree.map(
            lambda p, new, near: _left_over(new, near).astype(p.dtype) if p.dtype in HALF else None, params, moved, kept
        )
        followed = jax.tree.map(step_to, params, kept, updates)
        return followed, CompensatedWeightsState(rest, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _given(params: Any) -> Any:
    if params is None:
        raise UsageError("half-precision weights need the parameters: tx.update(grads, opt_state, params)")
    return params


def _is_none(node) -> bool:
    return node is None


def _left_over(value: jax.Array, near: jax.Array) -> jax.Array:
    return jnp.where(value == near, jnp.float32(0), value - near)  # also where both are inf


def _sum(param: jax.Array, rest: jax.Array | None) -> jax.Array:
    """Adds the remainder of rounding, `rest`, to a parameter, in float32; if `rest` is None, returns the parameter.

    The remainder is left out where it does not belong to the parameter, because the user has since set it to another
    value: the sum would not round to the parameter.
    """
    if rest is None:
        return param
    value, rest = param.astype(FLOAT32), rest.astype(FLOAT32)
    # The remainder may be half the distance between two numbers. A slightly smaller sum always rounds to the parameter.
    belongs = nearest(value + rest * (1 - 2.0**-9), param.dtype) == value
    return jnp.where(belongs & (rest != 0), value + rest, value)


def _rounded(param: jax.Array, before: jax.Array, after: jax.Array, seed: jax.Array) -> jax.Array:
    """Rounds `after`, a parameter in float32 after an update, stochastically to the stored dtype.

    A number that equals its value `before` the update keeps every bit. For a parameter that is not in half precision,
    the result is `after` itself.
    """
    if param.dtype not in HALF:
        return after
    if param.dtype == BFLOAT16:  # fuses with the update
        rounded = stochastic_bfloat16(after, seed)
    else:
        rounded = stochastic_round(after, param.dtype, jax.random.key(seed))
    return jnp.where(after == before, param, rounded)
