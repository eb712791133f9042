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
    return jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), gradients)


def discard_window(old, new):
    """Returns state `old` with the micro-batch counter of `new` and a zero gradient sum.

    The sum restarts at zero, so that nothing of a bad window is added to the next one.
    """
    accumulator = _accumulator(new)
    if accumulator is None:
        return old

    def keep_place(node):
        if not _is_accumulator(node):
            return node
        zeros = jax.tree.map(jnp.zeros_like, node.acc_grads)
        return node._replace(mini_step=accumulator.mini_step, acc_grads=zeros)

    return jax.tree.map(keep_place, old, is_leaf=_is_accumulator)
