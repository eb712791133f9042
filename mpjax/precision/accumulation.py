"""Gradient accumulation inside loss scaling: which micro-batches of an `optax.MultiSteps` make up one step.

Without a `MultiStepsState` in the optimizer state every step is a window of its own, known while tracing.
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
        raise UsageError("loss scaling takes one optax.MultiSteps inside, found several: accumulate once, outermost")
    return found[0] if found else None


def opens_window(state) -> jax.Array:
    """Whether the next micro-batch is the first of its window."""
    accumulator = _accumulator(state)
    return jnp.asarray(accumulator is None or accumulator.mini_step == 0)


def closes_window(old, new) -> jax.Array:
    """Whether going from state `old` to `new` completed a window."""
    before, after = _accumulator(old), _accumulator(new)
    return jnp.asarray(before is None or after is None or after.gradient_step != before.gradient_step)


def countable(gradients, finite: jax.Array, state):
    """The gradients, but zeros for bad ones, which an accumulator told to skip what is not finite would not count.

    Then its window would never close, and the scale never shrink.
    """
    if _accumulator(state) is None:
        return gradients
    return jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), gradients)


def discard_window(old, new):
    """State `old` with nothing learnt from a bad window, only its place in it as in `new`.

    The sum starts from zero again: what a bad micro-batch added to it would poison every later window.
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
