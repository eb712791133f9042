"""Skips optimizer steps with non-finite gradients, for one optimizer or several optimizers with one scale.

A window is one step, or the micro-batches of an inner `optax.MultiSteps`. Without a `MultiStepsState` in the optimizer
state, each window has one step, which is known at trace time.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.gradient_norm import all_finite
from mpjax.precision.optimizer_state import init_in_float32, parameters_seen


T = TypeVar("T")


class StepResult(NamedTuple):
    """The result of an attempted step.

    Attributes:
      updates: the optimizer's updates; all are -0.0 if the gradients were not finite, so that parameters keep their
        bits.
      finite: bool scalar, True if the gradients were finite, here and earlier in the window of micro-batches.
      state: the optimizer's state. If the gradients were not finite, it is the state before the step, except that an
        `optax.MultiSteps` counts the micro-batch and starts its sum of gradients from zero.
      closes_window: bool scalar, True if the step closed a window of any optimizer.
      window_finite: bool scalar, True if all micro-batches of the closed windows were finite; drives the loss scale.
    """

    updates: Any
    finite: jax.Array
    state: Any
    closes_window: jax.Array
    window_finite: jax.Array


class Attempt(NamedTuple):
    """An optimizer, or several, as the three functions that loss scaling calls.

    Attributes:
      init: `params -> state`, with moments in float32 or wider.
      where_finite: `(gradients, was_finite, state, params, extra, axis_name) -> StepResult`, for unscaled gradients.
        It skips the step if they are not finite. `was_finite` is the flag of the previous micro-batch.
      unconditionally: `(gradients, state, params, extra) -> (updates, state)`, without a check.
    """

    init: Callable
    where_finite: Callable[..., StepResult]
    unconditionally: Callable


class GroupState(NamedTuple):
    """The state of one of several optimizers.

    Attributes:
      finite: bool scalar, True if this optimizer's last gradients were finite, so that its last step was applied.
      inner_state: the optimizer's own state.
    """

    finite: jax.Array
    inner_state: Any


class CountedState(NamedTuple):
    """The state of an `Attempt` from `with_counts`. `dynamic_loss_scaling` resets both counts when the scale changes.

    Attributes:
      steps: int32, the number of steps since the last reset.
      skipped: int32, the number of skipped steps since the last reset.
      inner_state: the state of the wrapped attempt.
    """

    steps: jax.Array
    skipped: jax.Array
    inner_state: Any


def one_optimizer(inner: optax.GradientTransformation) -> Attempt:
    """Builds the `Attempt` of one optimizer; its `where_finite` skips steps whose gradients are not finite."""
    inner = optax.with_extra_args_support(inner)

    def unconditionally(gradients, state, params, extra):
        with optax_promotion():
            return inner.update(gradients, state, parameters_seen(inner, params), **extra)

    def where_finite(gradients, was_finite, state, params, extra, axis_name) -> StepResult:
        # One bad micro-batch discards its whole window.
        finite = _finite_on_all(gradients, axis_name) & (was_finite | opens_window(state))
        proposed, new_state = unconditionally(countable(gradients, finite, state), state, params, extra)
        kept = discard_window(state, new_state)
        updates = jax.tree.map(lambda u: _zero_unless(finite, u), proposed)
        new_state = with_sum_from_zero(state, new_state)
        return StepResult(updates, finite, select(finite, new_state, kept), closes_window(state, new_state), finite)

    return Attempt(functools.partial(init_in_float32, inner), where_finite, unconditionally)


def several_optimizers(attempts: Mapping[str, Attempt]) -> Attempt:
    """Builds the `Attempt` of several optimizers by name; non-finite gradients skip only their own optimizer.

    In the `StepResult`, `finite` is True if the gradients of all optimizers were finite. The state is a dict with a
    `GroupState` for each name. If parameters or gradients are not mappings with these names, raises UsageError.
    """

    def named(tree, kind: str) -> dict[str, Any]:
        if not isinstance(tree, Mapping) or set(tree) != set(attempts):
            got = ", ".join(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
            raise UsageError(f"several optimizers with one scale: wanted {kind} named {', '.join(attempts)}; got {got}")
        return dict(zip(*_opened(tree)[:2], strict=True))

    def init(params) -> dict[str, GroupState]:
        params = named(params, "parameters")
        return {name: GroupState(jnp.asarray(True), attempts[name].init(params[name])) for name in attempts}

    def unconditionally(gradients, state, params, extra):
        grads_of, params_of = named(gradients, "gradients"), {} if params is None else named(params, "parameters")
        results = {
            name: attempt.unconditionally(grads_of[name], state[name].inner_state, params_of.get(name), extra)
            for name, attempt in attempts.items()
        }
        states = {name: state[name]._replace(inner_state=result[1]) for name, result in results.items()}
        return _like(gradients, {name: result[0] for name, result in results.items()}), states

    def where_finite(gradients, was_finite, state, params, extra, axis_name) -> StepResult:
        grads_of, params_of = named(gradients, "gradients"), {} if params is None else named(params, "parameters")
        steps = {
            name: attempt.where_finite(
                grads_of[name], state[name].finite, state[name].inner_state, params_of.get(name), extra, axis_name
            )
            for name, attempt in attempts.items()
        }
        return StepResult(
            _like(gradients, {name: step.updates for name, step in steps.items()}),
            _all(step.finite for step in steps.values()),
            {name: GroupState(step.finite, step.state) for name, step in steps.items()},
            ~_all(~step.closes_window for step in steps.values()),
            _all(step.finite | ~step.closes_window for step in steps.values()),
        )

    return Attempt(init, where_finite, unconditionally)


def with_counts(attempt: Attempt) -> Attempt:
    """Wraps an attempt so that its state becomes a `CountedState`, which counts steps and skipped steps.

    Several micro-batches of an `optax.MultiSteps` count as one step, when they close a window. Unconditional steps do
    not count.
    """

    def init(params) -> CountedState:
        return CountedState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), attempt.init(params))

    def where_finite(gradients, was_finite, state, params, extra, axis_name) -> StepResult:
        step = attempt.where_finite(gradients, was_finite, state.inner_state, params, extra, axis_name)
        steps = state.steps + step.closes_window.astype(jnp.int32)
        skipped = state.skipped + (step.closes_window & ~step.window_finite).astype(jnp.int32)
        return step._replace(state=CountedState(steps, skipped, step.state))

    def unconditionally(gradients, state, params, extra):
        updates, inner_state = attempt.unconditionally(gradients, state.inner_state, params, extra)
        return updates, state._replace(inner_state=inner_state)

    return Attempt(init, where_finite, unconditionally)


def select(condition: jax.Array, new: T, old: T) -> T:
    """Selects every leaf of the tree `new` if the condition, a bool scalar array, is True, else every leaf of `old`.

    Both trees have the same structure. A leaf with JAX's empty dtype float0 is always that of `new`.
    """

    # Leaf by leaf, not by lax.cond: on a GPU the branches of a conditional double the optimizer's memory traffic.
    def pick(a, b):
        return a if a is b or _is_float0(a) else jnp.where(condition, a, b)

    return jax.tree.map(pick, new, old)


def _zero_unless(finite: jax.Array, update):
    # p + -0.0 is p bit for bit, while -0.0 + 0.0 is 0.0. Finite steps have zero updates too: for a parameter without a
    # gradient, and for all parameters between the ends of two windows.
    return update if _is_float0(update) else jnp.where(finite & (update != 0), update, jnp.full_like(update, -0.0))


def _is_float0(leaf) -> bool:
    """True for float0, the empty dtype that JAX gives to gradients of integers."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def optax_promotion():
    """Context that turns on JAX's standard dtype promotion inside a `with` block.

    Optax divides by integer step counts, which fails under strict dtype promotion.
    """
    return jax.numpy_dtype_promotion("standard")


def _opened(mapping) -> tuple[list, list, Any]:
    """Splits a mapping into the list of its keys, the list of its values as stored, and its tree definition.

    A value is not read by its key, because a Flax FrozenDict or `nnx.State` wraps values that are mappings in its own
    type.
    """
    children, container = jax.tree_util.tree_flatten_with_path(mapping, is_leaf=lambda node: node is not mapping)
    return [path[0].key for path, _ in children], [child for _, child in children], container


def _like(mapping, parts: Mapping[str, Any]):
    """Rebuilds `parts`, a dict with the keys of `mapping`, as a mapping of the same type as `mapping`."""
    names, _, container = _opened(mapping)
    return jax.tree.unflatten(container, [parts[name] for name in names])


def _all(flags) -> jax.Array:
    return functools.reduce(operator.and_, flags)


def _finite_on_all(tree, axis_name) -> jax.Array:
    finite = all_finite(tree)
    if axis_name is not None:
        finite = jax.lax.pmin(finite.astype(jnp.int32), axis_name) == 1
    return finite


def _is_accumulator(node) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _accumulator(state) -> optax.MultiStepsState | None:
    leaves = jax.tree.leaves(state, is_leaf=_is_accumulator)
    accumulators = [leaf for leaf in leaves if _is_accumulator(leaf)]
    if len(accumulators) > 1:
        raise UsageError("loss scaling takes one optax.MultiSteps inside, found several: keep only the outermost")
    return accumulators[0] if accumulators else None


def opens_window(state) -> jax.Array:
    """True (a bool scalar array) if the next micro-batch is the first of its window, by the optimizer state.

    Always True without an `optax.MultiSteps` in the state. With more than one, raises UsageError.
    """
    accumulator = _accumulator(state)
    return jnp.asarray(accumulator is None or accumulator.mini_step == 0)


def closes_window(old, new) -> jax.Array:
    """True (a bool scalar array) if the update from optimizer state `old` to `new` completed a window.

    Always True without an `optax.MultiSteps` in the state. With more than one, raises UsageError.
    """
    before, after = _accumulator(old), _accumulator(new)
    return jnp.asarray(before is None or after is None or after.gradient_step != before.gradient_step)


def countable(gradients, finite: jax.Array, state):
    """Replaces all gradients of a micro-batch by zeros if `finite` is False and the state has an `optax.MultiSteps`.

    A `MultiSteps` that skips non-finite gradients does not count their micro-batch. Its window would never close, and
    the scale would never shrink. Without a `MultiSteps`, the gradients are returned as they are.
    """
    if _accumulator(state) is None:
        return gradients
    return _tree_or_zeros(finite, gradients)


def discard_window(old, new):
    """Builds the optimizer state after a micro-batch that is not finite, from the states `old` before and `new` after.

    It is `old` with the micro-batch counter of `new`. The sum of gradients is zero, so that no gradient of a bad window
    is added to the next one. Without an `optax.MultiSteps` in the state, it is `old` itself.
    """
    accumulator = _accumulator(new)
    if accumulator is None:
        return old
    opens = opens_window(old)

    def keep_place(node):
        if not _is_accumulator(node):
            return node
        return node._replace(mini_step=accumulator.mini_step, acc_grads=_tree_or_zeros(opens, node.acc_grads))

    return jax.tree.map(keep_place, old, is_leaf=_is_accumulator)


def with_sum_from_zero(old, new):
    """Sets the sum of gradients in the optimizer state `new` to 0.0 if the update from `old` completed a window.

    `optax.MultiSteps` multiplies the sum by zero, which turns negative values into -0.0 and inf into NaN. Without a
    `MultiSteps` in the state, nothing changes.
    """
    closes = closes_window(old, new)

    def restart(node):
        if not _is_accumulator(node):
            return node
        return node._replace(acc_grads=_tree_or_zeros(~closes, node.acc_grads))

    return jax.tree.map(restart, new, is_leaf=_is_accumulator)


def _tree_or_zeros(condition: jax.Array, tree):
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)
