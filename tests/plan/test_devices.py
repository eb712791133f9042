"""The facts of GPUs, and which GPU a driver means."""

from typing import get_args

import pytest

from mpjax.config import GpuName
from mpjax.plan import GPUS


def test_every_name_that_the_command_line_takes_has_its_facts():
    assert tuple(GPUS) == get_args(GpuName) == ("v100", "a100", "l4", "h100", "h200", "b200")


@pytest.mark.parametrize(
    ("name", "float32", "tensorfloat32", "bfloat16", "gigabytes_per_second"),
    [
        ("v100", 15.7, 15.7, 15.7, 900),
        ("a100", 19.5, 156, 312, 2039),
        ("l4", 30.3, 60, 121, 300),
        ("h100", 67, 494.5, 989.5, 3350),
        ("h200", 67, 494.5, 989.5, 4800),
        ("b200", 75, 1125, 2250, 8000),
    ],
)
def test_rates_are_those_of_the_data_sheets(name, float32, tensorfloat32, bfloat16, gigabytes_per_second):
    gpu = GPUS[name]
    rates = [gpu.rate(dtype) / 1e12 for dtype in ("float32", "tensorfloat32", "bfloat16")]
    assert rates == pytest.approx([float32, tensorfloat32, bfloat16])
    assert gpu.bandwidth / 1e9 == pytest.approx(gigabytes_per_second)


@pytest.mark.parametrize(
    ("name", "both_ways", "adapters"),
    [
        ("v100", 300, 4 * 100),
        ("a100", 600, 8 * 200),
        ("l4", 64, None),
        ("h100", 900, 8 * 400),
        ("h200", 900, 8 * 400),
        ("b200", 1800, 8 * 400),
    ],
)
def test_links_are_those_of_the_data_sheets(name, both_ways, adapters):
    """GB/s of both directions of a GPU's links, and Gbit/s of all adapters of a host of eight."""
    gpu = GPUS[name]
    assert gpu.link / 1e9 == both_ways / 2
    assert gpu.network == (adapters and adapters * 1e9 / 8 / 8)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_float32_rate_follows_from_units_and_clock(gpu):
    """Two operations for each unit and cycle; data sheets take the boost clock, which is up to 5 % lower."""
    assert gpu.flops["float32"] == pytest.approx(2 * gpu.multiprocessors * gpu.lanes * gpu.clock, rel=0.06)
