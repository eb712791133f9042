"""Wraps the compiled step: times the first calls to estimate the run, and traces some calls for a profile."""

import contextlib
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator

import jax


def estimated(
    train_call: Callable,
    *,
    start: int,
    steps: int,
    say: Callable[[int, float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Callable:
    """Wraps `train_call`: waits for the results of its first two calls, and estimates the time of all others.

    The estimate comes from the second call, because the first loads the program and fills the queue of batches. Later
    calls pass through unchanged.

    Args:
      train_call: `(state, fed, count) -> (state, metrics)` runs `count` steps.
      start: the number of steps attempted before.
      steps: the number of steps at which the run ends.
      say: called once, after the second call, with the number of attempted steps and the seconds that the remaining
        steps take; not called if none remain.
      clock: returns the time in seconds, from any start.
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


BEFORE = 5
"""Calls before the trace in a long run. Caches are cold in the first calls."""

TRACED = 5
"""Calls in the trace."""


@contextlib.contextmanager
def profiled(train_call: Callable, folder: pathlib.Path, counts: Iterable[int]) -> Iterator[Callable]:
    """Context that yields `train_call`, wrapped to write a profiler trace of some of its calls into `folder`.

    It traces calls number `BEFORE` + 1 to `BEFORE` + `TRACED`, counted from 1; in a shorter run, the last `TRACED`
    calls, or all if there are fewer. It waits for the state before and after the trace.

    Args:
      train_call: `(state, fed, count) -> (state, metrics)` runs `count` steps.
      folder: the folder of the trace.
      counts: the number of steps of every call of the run. Only the number of calls matters.
    """
    calls = sum(1 for _ in itertools.islice(counts, BEFORE + TRACED))
    before = max(0, calls - TRACED)
    made = 0
    tracing = False

    def traced_call(state, fed, count: int):
        nonlocal made, tracing
        if made == before:
            jax.block_until_ready(state)
            jax.profiler.start_trace(folder)
            tracing = True
        made += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=made):
            state, metrics = train_call(state, fed, count)
        if tracing and made == before + TRACED:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            tracing = False
        return state, metrics

    try:
        yield traced_call
    finally:
        if tracing:
            jax.profiler.stop_trace()
