"""Steps with the XLA options of a run, in the loop of a library's user too."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.core import Tracer

from mpjax.training.state import TrainState


def compiled_with(options: Mapping[str, Any], step: Callable) -> jax.stages.Wrapped:
    """Jit-compiles a step, which donates its state, with XLA's `options`."""
    plain = jax.jit(step, donate_argnums=0)
    return _WithOptions(plain, jax.jit(step, donate_argnums=0, compiler_options=dict(options))) if options else plain


class _WithOptions:
    """A jitted step that may also be called inside `jax.jit`, where JAX refuses options of its own."""

    def __init__(self, nested: jax.stages.Wrapped, outermost: jax.stages.Wrapped):
        self._nested = nested
        self._outermost = outermost

    def __call__(self, state: TrainState, batch: Any) -> Any:
        return (self._nested if isinstance(state.step, Tracer) else self._outermost)(state, batch)

    def __getattr__(self, name: str) -> Any:  # trace, lower, eval_shape, clear_cache
        return getattr(self._outermost, name)
