"""Gradient accumulation under loss scaling: which micro-batches of an `optax.MultiSteps` form one step.

Without a `MultiStepsState` in the optimizer state, every step is a window of one, which is known at trace time.
"""

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError


def _is_accumulator(node) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _accumulator(state) -> optax.MultiStepsState | None:
    leaves = jax.tree.leaves(state, is_leaf=_is_accumulator)
    found = [leaf for leaf in leaves if _is_accumulator(leaf)]
    if len(found) > 1:
        raise UsageError("loss scaling takes one optax.MultiSteps inside, found several: keep only the outermost")
    return found[0] if found else None


def opens_window(state) -> jax.Array:
    """Returns True if the next micro-batch is the first of its window."""
    accumulator = _accumulator(state)
    return jnp.asarray(accumulator is None or accumulator.mini_step == 0)


def closes_window(old, new) -> jax.Array:
    """Returns True if the update from state `old` to state `new` completed a window."""
    before, after = _accumulator(old), _accumulator(new)
    return jnp.asarray(before is None or after is None or after.gradient_step != before.gradient_step)


def countable(gradients, finite: jax.Array, state):
    """Returns the gradients, or zeros if they are not finite and an accumulator will add them up.

    An accumulator that skips non-finite gradients does not count their micro-batch. Its window would never close, and
    the scale would never shrink.
    """
    if _accumulator(state) is None:
        return gradients
    return _zero_unless(finite, gradients)


def discard_window(old, new):
    """Returns state `old` with the micro-batch counter of `new` and the gradient sum of a window that begins.

    The sum restarts at zero, so that nothing of a bad window is added to the next one.
    """
    accumulator = _accumulator(new)
    if accumulator is None:
        return old
    opens = opens_window(old)

    def keep_place(node):
        if not _is_accumulator(node):
            return node
        return node._replace(mini_step=accumulator.mini_step, acc_grads=_zero_unless(opens, node.acc_grads))

    return jax.tree.map(keep_place, old, is_leaf=_is_accumulator)


def with_sum_from_zero(old, new):
    """Returns state `new` with a gradient sum of zero if the update from `old` completed a window.

    `optax.MultiSteps` multiplies the sum by zero, which leaves -0.0 of what was negative, and NaN of what was inf.
    """
    closes = closes_window(old, new)

    def restart(node):
        if not _is_accumulator(node):
            return node
        return node._replace(acc_grads=_zero_unless(~closes, node.acc_grads))

    return jax.tree.map(restart, new, is_leaf=_is_accumulator)


def _zero_unless(condition: jax.Array, tree):
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)
