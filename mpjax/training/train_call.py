"""Compiles calls of the training step: one step, or several steps that run without the host in between."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def make_train_call(train_step: Callable, batch_of: Callable[[Any, Any], Any]) -> jax.stages.Wrapped:
    """Builds the jit-compiled call `(state, fed, count) -> (state, metrics)` of `count` steps; it donates the state.

    Args:
      train_step: `(state, batch) -> (state, metrics)`.
      batch_of: `(fed, index) -> batch`, the batch of step `index` of the call, counted from 0.

    Returns:
      A function whose metrics have a leading axis [count], or none if the count is 1. The count is static: each count
        compiles its own program.
    """

    @jax.jit(donate_argnums=0, static_argnums=2)
    def train_call(state, fed, count: int):
        if count == 1:
            return train_step(state, batch_of(fed, 0))
        # The count is static, so the device runs all steps without the host.
        return jax.lax.scan(lambda state, index: train_step(state, batch_of(fed, index)), state, jnp.arange(count))

    return train_call


class CallProgram(NamedTuple):
    """The program of a call at all stages of compilation.

    Attributes:
      jaxpr: the traced program.
      lowered: the input of XLA.
      compiled: the output of XLA.
    """

    jaxpr: Any
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled


def compile_calls(
    call: jax.stages.Wrapped,
    state: Any,
    feeds: Mapping[int, Any],
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    see: Callable[[int, CallProgram], None] = lambda count, program: None,
) -> Callable:
    """Compiles `call` ahead of time for the counts in `feeds`; the result raises KeyError for any other count.

    Args:
      call: a jitted function `(state, fed, count)`.
      state: the state, or its shapes, dtypes and shardings.
      feeds: the input `fed` by count, or its shapes, dtypes and shardings.
      options: XLA options.
      see: called with each count and its program.
    """
    programs = {}
    for count, fed in feeds.items():
        traced = call.trace(state, fed, count)
        lowered = traced.lower()
        programs[count] = lowered.compile(compiler_options=dict(options))
        see(count, CallProgram(traced.jaxpr, lowered, programs[count]))
    return lambda state, fed, count: programs[count](state, fed)
