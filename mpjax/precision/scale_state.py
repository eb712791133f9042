"""The state of loss scaling: finds it in an optax state, and restores values after a skipped step."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.dtypes import check_same_dtypes, path_name
from mpjax.precision.skip_step import CountedState, select


T = TypeVar("T")


class LossScaleState(NamedTuple):
    """The state of the loss-scaling wrappers. All scalars are arrays from the start, so a step compiles once.

    Attributes:
      scale: float32, the factor of the next loss; a power of two.
      good_steps: int32, finite steps since the scale last grew or a step was skipped.
      skipped: int32, the total number of skipped steps.
      consecutive_skips: int32, steps skipped since the last finite step.
      finite: bool, True if the last gradients were finite, so that the last step was applied. With `optax.MultiSteps`
        inside, also False for the rest of the window of micro-batches. The counts above are of windows.
      inner_state: the wrapped optimizer's state; for several optimizers, a `GroupState` for each name. With a
        `tolerance`, it is inside a `CountedState`.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array
    finite: jax.Array
    inner_state: Any


def loss_scale_state(opt_state) -> LossScaleState:
    """Finds the one `LossScaleState` inside an optimizer state, at any depth.

    Raises:
      UsageError: the tree has none, or more than one.
    """
    states = states_in(opt_state)
    if len(states) != 1:
        raise UsageError(
            f"wanted one LossScaleState in the optimizer state, found {len(states)}: wrap the optimizer once, as in "
            "mpjax.dynamic_loss_scaling(optax.adamw(1e-3)), and pass tx.init(params)"
        )
    return states[0]


def where_finite(opt_state, new: T, old: T, *, group: str | None = None) -> T:
    """Selects the tree `new` if the last step's gradients were finite, else `old`, also under `jax.jit`.

    Use it for values beside the optimizer, such as batch statistics, that a skipped step must not change. Both trees
    have the same structure.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> opt_state = mpjax.static_loss_scaling(optax.sgd(0.1), 1024.0).init(jnp.float32(1))
    >>> skipped = opt_state._replace(finite=jnp.asarray(False))
    >>> mpjax.where_finite(skipped, new=jnp.float32(2), old=jnp.float32(1))
    Array(1., dtype=float32)

    Args:
      opt_state: the optimizer's state after the step.
      new: the values after the step.
      old: the values before the step.
      group: the name of the optimizer whose gradients decide, if several share a scale; by default all must be finite.

    Raises:
      UsageError: `opt_state` has not exactly one loss scale, no optimizer has the name `group`, or a leaf of `new`
        differs in shape from that of `old`.
      DtypeError: a leaf of `new` differs in dtype from that of `old`; the message lists all these leaves by path.
    """
    state = loss_scale_state(opt_state)
    check_same_dtypes(new, old, names=("new", "old"))
    pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=False)
    for (path, a), b in pairs:
        if np.shape(a) != np.shape(b):
            name = path_name(path) or "the value itself"
            raise UsageError(f"{name} has shape {np.shape(a)} in new and {np.shape(b)} in old: wanted equal shapes")
    if group is None:
        return select(state.finite, new, old)
    inner_state = state.inner_state.inner_state if isinstance(state.inner_state, CountedState) else state.inner_state
    groups = inner_state if isinstance(inner_state, Mapping) else {}
    if group not in groups:
        names = f"wanted one of {', '.join(groups)}" if groups else "it has one optimizer, without a name: omit group="
        raise UsageError(f"no optimizer '{group}' under this loss scale; {names}")
    return select(groups[group].finite, new, old)


def states_in(tree) -> list[LossScaleState]:
    """Collects every outermost `LossScaleState` in a tree; a state inside the `inner_state` of another is left out."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LossScaleState))
    return [leaf for leaf in leaves if isinstance(leaf, LossScaleState)]
