"""Optimizer moments in bfloat16, as an optax wrapper: half the memory, with unbiased rounding.

With b2 = 0.999 a step moves a second moment by a thousandth of the way to the squared gradient. This is often less than
half the distance between two bfloat16 numbers, so rounding to nearest would stall it. Moments are therefore rounded
stochastically (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, arXiv:1502.02551, section 3).
Float16 is unsuitable, because the squares of gradients below 2e-4 underflow in it.
"""

from collections.abc import Callable, Collection, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import BFLOAT16, FLOAT16, FLOAT32, in_float32
from mpjax.precision.optimizer_state import init_in_float32, parameters_seen
from mpjax.precision.stochastic_rounding import seed_of, stochastic_bfloat16


MOMENTS = ("mu", "nu", "nu_max", "trace")
"""The fields in which optax's optimizers keep moments: Adam and its successors, RMSProp, momentum."""


SECOND = ("nu", "nu_max")
"""The fields of `MOMENTS` that are means of squares."""


class HalfMomentsState(NamedTuple):
    """The state of `half_moments`.

    Attributes:
      inner_state: the wrapped optimizer's state, with moments in bfloat16.
      draws: int32, the number of updates so far, a seed of the rounding.
    """

    inner_state: Any
    draws: jax.Array


class StoredMomentsState(NamedTuple):
    """The state of an optimizer whose moments are stored in a `MomentFormat`.

    Attributes:
      inner_state: the wrapped optimizer's state, with stored moments.
      draws: int32, the number of updates so far, a seed of the rounding.
    """

    inner_state: Any
    draws: jax.Array


class MomentFormat(NamedTuple):
    """How float32 moments are stored between updates.

    Attributes:
      name: the name of the wrapper, in messages.
      store: from a moment, its seed (uint32), and True for a second moment, to what is stored: a pytree or the moment.
      restore: from what is stored, and True for a second moment, to the moment.
      kinds: the types of pytrees that `store` makes.
    """

    name: str
    store: Callable[[jax.Array, jax.Array, bool], Any]
    restore: Callable[[Any, bool], jax.Array]
    kinds: tuple[type, ...]


def half_moments(inner: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it stores its moments in bfloat16 between updates.

    The optimizer itself computes with float32 moments. They are rounded stochastically after each update. Counts,
    schedules, master weights, micro-batch sums and float64 moments stay unchanged. Put it inside the loss scaling,
    `dynamic_loss_scaling(half_moments(optax.adamw(1e-3)))`: a skipped step then keeps every bit.

    Rounding noise decays like the gradients in a moment. For normally distributed gradients its standard deviation is
    3.5 % of a second moment with b2 = 0.999 (Adam divides by the square root, which has half of that), 1.7 % with
    b2 = 0.99, and 0.6 % of a first moment with b1 = 0.9. Its mean is zero.

    Args:
      inner: the optimizer (chain).
      seed: the seed of the random numbers, which differ from moment to moment and from update to update.

    Raises:
      UsageError: at `init`, the state of `inner` has no field of `MOMENTS`, or is that of a centered RMSProp.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params) -> HalfMomentsState:
        state = init_in_float32(inner, params)
        require_moments(state, params, "half_moments")
        stored = _map_moments(lambda leaf, _: leaf.astype(BFLOAT16), state, params)
        return HalfMomentsState(stored, jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra):
        float32_state = _map_moments(lambda leaf, _: leaf.astype(FLOAT32), state.inner_state, updates)
        followed, new = inner.update(in_float32(updates), float32_state, parameters_seen(inner, params), **extra)

        def rounded(leaf, number: int):
            return stochastic_bfloat16(leaf.astype(FLOAT32), seed_of(seed, state.draws, number))

        return followed, HalfMomentsState(_map_moments(rounded, new, updates), state.draws + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def stored_in(
    form: MomentFormat, inner: optax.GradientTransformation, *, seed: int
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it computes with float32 moments, and stores them in a format between updates.

    Moments in other dtypes, and all other state, stay unchanged. Raises UsageError at `init` if there are no moments.
    """
    inner = optax.with_extra_args_support(inner)

    def stored(state, draws: jax.Array, parameters: Set[tuple]):
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        return jax.tree.unflatten(
            treedef,
            [
                form.store(leaf, seed_of(seed, draws, number), is_moment(path, parameters, SECOND))
                if is_moment(path, parameters) and leaf.dtype == FLOAT32
                else leaf
                for number, (path, leaf) in enumerate(leaves)
            ],
        )

    def init(params) -> StoredMomentsState:
        state = init_in_float32(inner, params)
        require_moments(state, params, form.name)
        draws = jnp.zeros((), jnp.int32)
        return StoredMomentsState(stored(state, draws, paths_of(params)), draws)

    def update(updates, state, params=None, **extra):
        parameters = paths_of(updates)

        def restored(path: tuple, leaf: Any) -> Any:
            return form.restore(leaf, is_moment(path, parameters, SECOND)) if is_moment(path, parameters) else leaf

        float32_state = jax.tree_util.tree_map_with_path(
            restored, state.inner_state, is_leaf=lambda node: isinstance(node, form.kinds)
        )
        updates, new = inner.update(in_float32(updates), float32_state, parameters_seen(inner, params), **extra)
        return updates, StoredMomentsState(stored(new, state.draws + 1, parameters), state.draws + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def require_moments(state: Any, params: Any, wrapper: str) -> None:
    """Raises UsageError if an optimizer's state for `params` has no moments, or none that can be rounded.

    `wrapper` is the name in the message.
    """
    if not has_moments(state, params):
        raise UsageError(f"{wrapper}: no moments ({', '.join(MOMENTS)}) in this optimizer's state; leave {wrapper} out")
    if subtracts_moments(state):
        raise UsageError(f"{wrapper}: {SUBTRACTED}; leave {wrapper} out")


SUBTRACTED = (
    "the centered RMSProp divides by the root of nu - mu^2, which is negative, and the root NaN, once the moments are "
    "rounded apart"
)


def subtracts_moments(state: Any) -> bool:
    """True if an optimizer divides by the root of a difference of its moments, which rounding makes negative."""
    return any(map(_subtracts, jax.tree.leaves(state, is_leaf=_subtracts)))


def _subtracts(node: Any) -> bool:
    return isinstance(node, optax.ScaleByRStdDevState)


def has_moments(state: Any, params: Any) -> bool:
    """True if an optimizer's state for `params` has a moment, a leaf in a field of `MOMENTS`.

    A leaf that `optax.masked` has replaced by a placeholder counts too.
    """
    parameters = paths_of(params)
    if not parameters:  # as from optax.tree.map_params, which makes a state for a placeholder
        return any(optax.tree.get_all_with_path(state, name) for name in MOMENTS)
    return any(is_moment(path, parameters) for path in paths_of(state))


def paths_of(tree: Any) -> Set[tuple]:
    """Collects the key paths of all leaves of a tree, including leaves that `optax.masked` has replaced."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return {path for path, _ in leaves}


def is_moment(path: tuple, parameters: Set[tuple], names: Collection[str] = MOMENTS) -> bool:
    """True if a key path in an optimizer's state leads to a moment: one of the state's own fields in it is in `names`.

    The keys at the end of the path that are the path of a parameter do not count, because parameters may have any
    names: in `masters.mu`, `mu` may be a parameter, which is no moment.

    Args:
      path: the path of a leaf of the state.
      parameters: `paths_of` the parameters, or of gradients.
      names: the names of the fields that hold moments.
    """
    fields = next((path[:end] for end in range(len(path)) if path[end:] in parameters), path)
    return any(isinstance(key, jax.tree_util.GetAttrKey) and key.name in names for key in fields)


def _map_moments(change, state, like):
    """Replaces each float32, bfloat16 or float16 moment of a state by `change(moment, its index among all leaves)`.

    `like` is a tree with the key paths of the parameters, such as gradients. Other leaves stay unchanged.
    """
    parameters = paths_of(like)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    changed = [
        change(leaf, number) if is_moment(path, parameters) and leaf.dtype in (FLOAT32, BFLOAT16, FLOAT16) else leaf
        for number, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, changed)
