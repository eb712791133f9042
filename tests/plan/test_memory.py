"""What a step takes of a device's memory."""

import types

import pytest

from mpjax.commands.plan import fields_of, planned_step
from mpjax.plan.memory import Memory, memory_of


def test_a_state_is_sorted_by_what_it_is_for(small):
    """64 -> 16 -> 16 -> 10 with biases are 1482 parameters; SGD keeps a momentum of each, and some scalars."""
    found = types.SimpleNamespace(temp_size_in_bytes=700, output_size_in_bytes=99, alias_size_in_bytes=90)
    memory = memory_of(planned_step(small, fields_of(small)), found, devices=2)
    parameters = 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10
    assert memory.parameters == 4 * parameters
    assert memory.optimizer - 4 * parameters == pytest.approx(24, abs=12)
    assert (memory.statistics, memory.batch) == (0, 24 * (64 + 4) // 2)
    assert (memory.temporary, memory.extra) == (700, 9)


def test_the_total_is_of_all():
    assert (
        Memory(parameters=1, optimizer=20, statistics=300, batch=4_000, temporary=50_000, extra=600_000).total == 654321
    )
