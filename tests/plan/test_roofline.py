"""The time of a step at best."""

import pytest

from mpjax.plan.devices import GPUS
from mpjax.plan.estimate import roofline


def test_traffic_bounds_a_step_that_moves_more_than_it_computes():
    found = roofline(GPUS["a100"], {"bfloat16": 312e9}, 20.39e9)  # a millisecond of arithmetic, ten of traffic
    assert (found.compute, found.traffic) == pytest.approx((1e-3, 10e-3))
    assert (found.seconds, found.serial) == pytest.approx((10e-3, 11e-3))
    assert found.bound == "traffic"


def test_arithmetic_bounds_a_step_that_computes_more_and_each_dtype_has_its_rate():
    found = roofline(GPUS["a100"], {"float16": 312e9, "tensorfloat32": 156e9, "float32": 19.5e9}, 2.039e9)
    assert (found.compute, found.traffic) == pytest.approx((3e-3, 1e-3))
    assert (found.seconds, found.bound) == (found.compute, "compute")


def test_a_gpu_without_units_for_a_dtype_computes_it_in_float32():
    assert roofline(GPUS["v100"], {"bfloat16": 15.7e9}, 0).compute == pytest.approx(1e-3)
