"""An estimate of a run's time from its first calls."""

import time
from collections.abc import Callable

import jax


def estimated(
    train_call: Callable,
    *,
    start: int,
    steps: int,
    say: Callable[[int, float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Callable:
    """Returns `train_call` that waits for its first two calls and says how long the others will take.

    The second call is timed: the first loads the program and fills the queue of batches.

    Args:
      train_call: `(state, fed, count) -> (state, metrics)` runs `count` steps.
      start: steps attempted before.
      steps: the number of steps at which the run ends.
      say: called with the number of attempted steps and the seconds that the others take, unless none is left.
      clock: the function that returns the time in seconds, from any start.
    """
    position, ends = start, []

    def call(state, fed, count: int):
        nonlocal position
        state, metrics = train_call(state, fed, count)
        if len(ends) < 2:
            position += count
            jax.block_until_ready(metrics)
            ends.append(clock())
            if len(ends) == 2 and position < steps:
                say(position, (ends[1] - ends[0]) * (steps - position) / count)
        return state, metrics

    return call
