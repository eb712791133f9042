"""The estimate after the first calls."""

import pytest

from mpjax.loop import estimated


@pytest.mark.parametrize(
    ("start", "steps", "counts", "said"),
    [
        (0, 100, [1, 1, 1, 1], [(2, 196.0)]),  # 2 seconds a step
        (10, 100, [5, 5, 5], [(20, 32.0)]),  # 2 seconds for 5
        (0, 2, [1, 1], []),
        (0, 100, [100], []),
        (98, 100, [1], []),
    ],
)
def test_the_second_call_says_how_long_the_others_take(start, steps, counts, said):
    times, found = iter([50.0, 52.0, 99.0, 99.0]), []
    call = estimated(
        lambda state, fed, count: (state + count, {"loss": fed}),
        start=start,
        steps=steps,
        say=lambda *words: found.append(words),
        clock=lambda: next(times),
    )
    state = start
    for count in counts:
        state, metrics = call(state, 0.5, count)
    assert (state, metrics) == (start + sum(counts), {"loss": 0.5})
    assert found == said
