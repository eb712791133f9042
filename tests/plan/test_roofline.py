"""The time of a step, at best and to expect."""

import pytest

from mpjax.plan import GPUS, Roofline, bounds_of, expected_seconds


def test_traffic_bounds_a_step_that_moves_more_than_it_computes():
    found = bounds_of(GPUS["a100"], {"bfloat16": 312e9}, 20.39e9)  # a millisecond of arithmetic, ten of traffic
    assert (found.compute, found.traffic) == pytest.approx((1e-3, 10e-3))
    assert (found.seconds, found.serial) == pytest.approx((10e-3, 11e-3))
    assert found.bound == "traffic"


def test_arithmetic_bounds_a_step_that_computes_more_and_each_dtype_has_its_rate():
    found = bounds_of(GPUS["a100"], {"float16": 312e9, "tensorfloat32": 156e9, "float32": 19.5e9}, 2.039e9)
    assert (found.compute, found.traffic) == pytest.approx((3e-3, 1e-3))
    assert (found.seconds, found.bound) == (found.compute, "compute")


def test_a_gpu_without_units_for_a_dtype_computes_it_in_float32():
    assert bounds_of(GPUS["v100"], {"bfloat16": 15.7e9}, 0).compute == pytest.approx(1e-3)


def test_to_expect_are_measured_rates_one_after_the_other_and_the_launches():
    """790 ms of products at 790/990 of the rate, 430 ms of copies at 4.3/4.8, 10 ms of launches; 0.89 of all that."""
    found = expected_seconds(Roofline(compute=0.790, traffic=0.430), kernels=5000)
    assert found == pytest.approx((0.990 + 0.480 + 0.010) / 0.89)
