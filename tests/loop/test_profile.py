"""Which calls of a run are traced."""

import jax
import pytest

from mpjax.loop import profiled


@pytest.fixture
def events(monkeypatch):
    """What happens to the profiler, to the training and to the state, in order."""
    noted = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: noted.append(f"start {folder}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: noted.append("stop"))
    monkeypatch.setattr(jax, "block_until_ready", lambda state: noted.append(f"wait {state}"))
    return noted


def calling(events, *, broken=None):
    """A training call whose state is the number of calls so far; call number `broken` fails."""

    def train_call(state, fed, count):
        events.append(state + 1)
        if state + 1 == broken:
            raise FloatingPointError("broken")
        return state + 1, {"fed": fed, "count": count}

    return train_call


def run(events, calls, counts, broken=None):
    with profiled(calling(events, broken=broken), "here", counts) as call:
        state = 0
        for _ in range(calls):
            state, _ = call(state, "batch", 1)


def traced(events):
    """The calls between the start and the stop of the trace, of which there is one."""
    assert [event for event in events if event in ("start here", "stop")] == ["start here", "stop"]
    between = events[events.index("start here") : events.index("stop")]
    return [event for event in between if isinstance(event, int)]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [(20, [6, 7, 8, 9, 10]), (10, [6, 7, 8, 9, 10]), (7, [3, 4, 5, 6, 7]), (5, [1, 2, 3, 4, 5]), (2, [1, 2])],
)
def test_a_long_run_is_traced_from_its_sixth_call_and_a_short_one_at_its_end(events, calls, expected):
    run(events, calls, [1] * calls)
    assert traced(events) == expected


def test_the_trace_begins_and_ends_when_the_devices_have_nothing_left_to_do(events):
    run(events, 12, [1] * 12)
    assert events[5:8] == ["wait 5", "start here", 6]
    assert events[11:14] == [10, "wait 10", "stop"]


@pytest.mark.parametrize(("broken", "expected"), [(8, ["start here", "stop"]), (3, []), (11, ["start here", "stop"])])
def test_a_call_that_fails_ends_a_trace_that_has_begun_and_no_other(events, broken, expected):
    with pytest.raises(FloatingPointError, match="broken"):
        run(events, 20, [1] * 20, broken)
    assert [event for event in events if event in ("start here", "stop")] == expected


def test_a_traced_call_is_given_and_gives_what_the_call_does(events):
    with profiled(calling(events), "here", [4, 1]) as call:
        assert call(0, "first", 4) == (1, {"fed": "first", "count": 4})
        assert call(1, "second", 1) == (2, {"fed": "second", "count": 1})


def test_of_a_long_run_the_first_ten_counts_are_read(events):
    counts = iter(range(10**6))
    run(events, 0, counts)
    assert next(counts) == 10
    assert events == []
