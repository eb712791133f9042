"""A compiled training step of JAX as the function that is timed."""

from collections.abc import Callable
from typing import Any

import jax

from peers import tasks


def stepping(train_step: Callable, state: Any) -> Callable[[int], dict]:
    """Step number `index`, on the batches in turn, from `train_step`: `(state, batch) -> (state, metrics)`."""
    batches = jax.device_put(tasks.batches())

    def step(index: int) -> dict:
        nonlocal state
        state, metrics = train_step(state, batches[index % len(batches)])
        return metrics

    return step
