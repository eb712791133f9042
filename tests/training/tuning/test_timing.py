"""Which of two programs is the faster, from their timings."""

import types

import pytest

from mpjax.training.tuning.timing import Timing, side_by_side


ONE = (1.0,) * 8


@pytest.mark.parametrize(
    ("half", "faster"),
    [
        ((1.2,) * 8, True),
        ((1.1,) * 8, False),  # no more than the margin
        ((0.5,) * 8, False),
        ((1.2,) * 6 + (1.0,) * 2, True),  # a quarter of the rounds may have been disturbed
        ((1.2,) * 5 + (1.0,) * 3, False),
        ((9.0,) * 3 + (1.0,) * 5, False),  # a large mean is not enough
    ],
)
def test_float32_is_faster_if_it_is_by_the_margin_in_three_quarters_of_the_rounds(half, faster):
    assert Timing(half, ONE).faster_by(0.1) == faster


def test_rounds_are_compared_one_by_one_so_that_a_slow_machine_slows_both():
    drifting = tuple(float(2**n) for n in range(8))
    assert Timing(tuple(1.2 * s for s in drifting), drifting).faster_by(0.1)
    assert Timing(tuple(1.2 * s for s in drifting), drifting).gain == pytest.approx(1.2)


def test_programs_take_turns_and_each_may_go_first(monkeypatch):
    clock, calls = [0.0], []
    stand_in = types.SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr("mpjax.training.tuning.timing.time", stand_in)

    def program(name, seconds):
        def run():
            calls.append(name)
            clock[0] += seconds

        return run

    timing = side_by_side(program("half", 0.002), program("full", 0.1), rounds=3)
    assert timing.half == pytest.approx((0.002,) * 3)
    assert timing.full == pytest.approx((0.1,) * 3)
    assert timing.gain == pytest.approx(0.02)
    # Once to warm up, once to see how often two milliseconds fit into four, then in turns.
    assert calls == ["half", "full", "half", "full", "full", *["half"] * 4, "full", "full", "half", "half"]
