"""Readings: their shares and their sums, and the order of what made zeros and infinities."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.diagnosis import Marks, Recorder, Site, apart, ratio, together
from mpjax.precision import FLOAT16, FLOAT32


def observed(recorder, wide, low, marks=(), dtype=FLOAT16):
    wide, low = jnp.asarray(wide, jnp.float32), jnp.asarray(low, jnp.float32)
    return recorder.observe(Site("", "forward", "mul", dtype, wide.shape, ""), wide, wide, low, marks)


def reading_of(wide, low, dtype=FLOAT16):
    recorder = Recorder()
    observed(recorder, wide, low, dtype=dtype)
    return recorder.readings()[0]


@pytest.mark.parametrize(("part", "whole", "share"), [(9.0, 4.0, 1.5), (0.0, 0.0, 0.0), (1e-30, 0.0, 1.0)])
def test_a_share_of_nothing_is_all_or_nothing(part, whole, share):
    assert ratio(part, whole) == share


def test_errors_and_losses_are_shares_of_the_norm():
    reading = reading_of([3.0, 4.0], [3.0, 0.0])
    assert reading.relative_error == pytest.approx(0.8)
    assert reading.lost_fraction == pytest.approx(0.8)


def test_squares_that_float32_does_not_hold_are_added_up():
    large, small = reading_of([3e30, 4e30], [3e30, 3e30]), reading_of([3e-30, 4e-30], [3e-30, 0.0])
    assert large.reference == pytest.approx(25e60)
    assert large.relative_error == pytest.approx(0.2)
    assert small.relative_error == small.lost_fraction == pytest.approx(0.8)


def test_readings_together_are_sums_but_for_the_largest_and_the_latest():
    first, second = reading_of([1.0, 2.0], [1.0, 2.0]), reading_of([8.0], [8.0])
    both = together([first._replace(flushed=3), second])
    assert (both.size, both.total, both.largest, both.flushed) == (3.0, 11.0, 8.0, 3)
    assert both.histogram.sum() == 3


def test_a_result_in_float32_is_neither_overflow_nor_underflow():
    values = [1e6, 1e-9], [float("inf"), 0.0]
    half, single = (reading_of(*values, dtype=dtype) for dtype in (FLOAT16, FLOAT32))
    assert (half.overflow, half.underflow, half.non_finite) == (1, 1, 1)
    assert (single.overflow, single.underflow, single.non_finite) == (0, 0, 1)


def test_a_result_knows_the_latest_result_before_it_that_lost_values_to_zero():
    recorder = Recorder()
    first = observed(recorder, [1e-9], [0.0])
    second = observed(recorder, [1e-9], [0.0], [first])
    other = observed(recorder, [1.0], [1.0], [Marks()])
    observed(recorder, [1.0], [1.0], [first, second, other])
    observed(recorder, [1.0], [1.0], [other])
    assert [reading.flushed for reading in recorder.readings()] == [-1, 0, -1, 1, -1]


def test_results_in_a_loop_are_numbered_after_those_before_it():
    recorder = Recorder()
    observed(recorder, [1.0], [1.0])
    within = recorder.within()
    assert int(observed(within, [1e-9], [0.0]).flushed) == 1
    recorder.extend(within.sites, apart(within.stacked(), 1))
    assert int(observed(recorder, [1e-9], [0.0]).flushed) == 2
    assert [float(reading.underflow) for reading in recorder.readings()] == [0, 1, 1]
    assert np.shape(recorder.readings()[0].histogram) == (88,)
