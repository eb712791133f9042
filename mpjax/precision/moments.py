"""Optimizer moments in bfloat16, as an optax wrapper: half the memory, and still right in the mean.

With b2 = 0.999 a second moment changes by a thousandth of the gradient's square and of itself, less than half the
distance between two bfloat16 numbers: rounded to the nearest it would stall. So moments are rounded by chance
(Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, arXiv:1502.02551, section 3). Float16 is not for
them: squares of gradients below 2e-4 are zero in it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import BFLOAT16, FLOAT16, FLOAT32
from mpjax.precision.stochastic_rounding import stochastic_bfloat16


MOMENTS = ("mu", "nu", "nu_max", "trace")
"""The fields in which optax's optimizers keep moments: Adam and those after it, RMSProp, momentum."""


class HalfMomentsState(NamedTuple):
    """State of `half_moments`.

    Attributes:
      inner_state: the wrapped optimizer's state, its moments in bfloat16.
      draws: int32, updates so far, from which the random numbers of the rounding follow.
    """

    inner_state: Any
    draws: jax.Array


def half_moments(inner: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of `inner` in bfloat16, rounded by chance after each update; `inner` sees float32.

    Counts, schedules, master weights and sums of micro-batches stay as they are, and so do float64 moments. Put it
    inside the loss scaling, `dynamic_loss_scaling(half_moments(optax.adamw(1e-3)))`: a skipped step leaves every bit.
    What rounding did is forgotten as gradients are: second moments of normal gradients are off by a standard deviation
    of 3.5 % with b2 = 0.999 (Adam divides by their roots, which are off by half of that), by 1.7 % with 0.99, and first
    moments by 0.6 % with 0.9; in the mean they are right.

    Args:
      inner: the optimizer (chain).
      seed: of the random numbers; they differ from moment to moment and from update to update.

    Raises:
      UsageError: `inner` keeps no moments.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params) -> HalfMomentsState:
        state = inner.init(params)
        if not any(optax.tree.get_all_with_path(state, name) for name in MOMENTS):
            raise UsageError(
                f"half_moments: no moments ({', '.join(MOMENTS)}) in this optimizer's state; use it without"
            )
        return HalfMomentsState(_map_moments(lambda leaf, _: leaf.astype(BFLOAT16), state), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra):
        wide = _map_moments(lambda leaf, _: leaf.astype(FLOAT32), state.inner_state)
        updates, new = inner.update(updates, wide, params, **extra)
        key = jax.random.fold_in(jax.random.key(seed), state.draws)
        seeds = jax.random.bits(key, (len(jax.tree.leaves(new)),), jnp.uint32)
        rounded = _map_moments(lambda leaf, number: stochastic_bfloat16(leaf.astype(FLOAT32), seeds[number]), new)
        return updates, HalfMomentsState(rounded, state.draws + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_moment(path: tuple) -> bool:
    return any(isinstance(key, jax.tree_util.GetAttrKey) and key.name in MOMENTS for key in path)


def _map_moments(change, state):
    """The state with `change(moment, its number among the leaves)` in place of each moment."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    changed = [
        change(leaf, number) if _is_moment(path) and leaf.dtype in (FLOAT32, BFLOAT16, FLOAT16) else leaf
        for number, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, changed)
