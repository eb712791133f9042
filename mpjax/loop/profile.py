"""A profile of a few training calls, for TensorBoard and XProf."""

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator

import jax


BEFORE = 5
"""Calls before the trace begins, if the run is long enough: caches are cold in the first calls."""

TRACED = 5
"""Calls in the trace."""


@contextlib.contextmanager
def profiled(train_call: Callable, folder: pathlib.Path, counts: Iterable[int]) -> Iterator[Callable]:
    """Yields `train_call` with calls number `BEFORE` + 1 to `BEFORE` + `TRACED` traced into `folder`.

    A run of fewer calls traces its last `TRACED` calls. `counts` holds the number of steps of every call of the run.
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
