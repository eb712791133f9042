"""A trace of some steps for TensorBoard and XProf: what the device and the host did, and for how long."""

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator

import jax


BEFORE = 5
"""Calls before the trace begins, where there are enough: in the first ones caches are cold."""

TRACED = 5
"""Calls in the trace."""


@contextlib.contextmanager
def profiled(train_call: Callable, folder: pathlib.Path, counts: Iterable[int]) -> Iterator[Callable]:
    """`train_call`, calls number `BEFORE` + 1 to `BEFORE` + `TRACED` of which are traced into `folder`.

    Of a run of fewer calls, whose steps `counts` has, the last `TRACED` are.
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
