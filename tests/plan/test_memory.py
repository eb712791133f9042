"""What a step takes of a device's memory."""

import types

import pytest

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.plan import Memory, memory_of
from mpjax.training import make_mesh


def test_a_state_is_sorted_by_what_it_is_for(small):
    """64 -> 16 -> 16 -> 10 with biases are 1482 parameters; SGD keeps a momentum of each, and some scalars."""
    found = types.SimpleNamespace(temp_size_in_bytes=700, output_size_in_bytes=99, alias_size_in_bytes=90)
    _, given = planned_step(small, fields_of(small)).on(make_mesh())
    memory = memory_of(*given, found)
    parameters = 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10
    assert memory.parameters == 4 * parameters
    assert memory.optimizer - 4 * parameters == pytest.approx(24, abs=12)
    assert (memory.statistics, memory.batch) == (0, 24 * (64 + 4) // 2)
    assert (memory.temporary, memory.extra) == (700, 9)


def test_what_fsdp_divides_counts_for_one_device_only():
    """Two kernels of 256 x 64 and 64 x 256; the biases are too small to divide."""
    flags = "--data.name synthetic:16x16x1:256 --data.batch_size 8 --model.name mlp --model.width 64 --model.depth 1"
    config = load_config(f"{flags} --mesh.data 1 --mesh.fsdp 2 --optimizer.name adamw --training.ema 0.9".split())
    _, given = planned_step(config, fields_of(config)).on(make_mesh(data=1, fsdp=2))
    found = types.SimpleNamespace(temp_size_in_bytes=0, output_size_in_bytes=0, alias_size_in_bytes=0)
    memory = memory_of(*given, found)
    one = 4 * (2 * 256 * 64 // 2 + 64 + 256)
    assert (memory.parameters, memory.statistics) == (one, one)
    assert memory.optimizer == pytest.approx(2 * one, abs=64)


def test_the_total_is_of_all():
    assert (
        Memory(parameters=1, optimizer=20, statistics=300, batch=4_000, temporary=50_000, extra=600_000).total == 654321
    )
