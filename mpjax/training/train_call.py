"""Several training steps in one compiled call, so that a small step does not wait for the host."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def make_train_call(train_step: Callable, batch_of: Callable[[Any, Any], Any]) -> Callable:
    """The jit-compiled call `(state, fed, count) -> (state, metrics)` of `count` steps; it donates the state.

    Args:
      train_step: `(state, batch) -> (state, metrics)`.
      batch_of: `(fed, index) -> batch`: what step number `index` of the call, from 0, learns from.

    Returns:
      A function whose metrics are [count] for each of a step's; those of a single step are as the step gives them. The
      count is static: each one is a program of its own.
    """

    @jax.jit(donate_argnums=0, static_argnums=2)
    def train_call(state, fed, count: int):
        if count == 1:
            return train_step(state, batch_of(fed, 0))
        # A count that the compiler knows: the device then runs all steps without asking the host.
        return jax.lax.scan(lambda state, index: train_step(state, batch_of(fed, index)), state, jnp.arange(count))

    return train_call


def compile_calls(call: Callable, state: Any, feeds: Mapping[int, Any]) -> Callable:
    """`call` with its programs made now, and no other: a count that is not in `feeds` is a KeyError.

    Args:
      call: a jitted function `(state, fed, count)`.
      state: what it will be given, or its shapes and where it will be.
      feeds: the same of what is fed, by count.
    """
    programs = {count: call.lower(state, fed, count).compile() for count, fed in feeds.items()}
    return lambda state, fed, count: programs[count](state, fed)
