"""A run that is out of memory says what fits."""

import dataclasses
import types

import jax
import pytest

from mpjax.commands import memory_told, require_memory, run
from mpjax.errors import UsageError
from mpjax.loop import Alone


FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes."


def told(config, error):
    with pytest.raises(UsageError) as refused, memory_told(config):
        raise error
    return str(refused.value)


def fits(monkeypatch, limit):
    """A device on which a step of 24 examples takes 24 bytes."""
    monkeypatch.setattr("mpjax.commands.fit.memory_limit", lambda devices, processes: limit)
    monkeypatch.setattr("mpjax.commands.fit.planned_step", lambda config, fields: config.training.accumulate)
    monkeypatch.setattr("mpjax.commands.fit.memory_here", lambda count, mesh: 24 // count)
    monkeypatch.setattr("mpjax.commands.fit.needed", lambda taken: taken)


@pytest.mark.parametrize(
    ("limit", "accumulate", "advice"),
    [
        (13, 1, "write --training.accumulate 2, with which the step fits by the estimate and learns the same"),
        (7, 2, "write --training.accumulate 4, with which the step fits by the estimate and learns the same"),
        (24, 1, "by the estimate the step fits into what is free now: end other programs"),
        (1, 1, "no number of micro-batches of a batch of 24 fits by the estimate; write a smaller --data.batch_size"),
    ],
)
@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError(FULL), MemoryError()], ids=["device", "host"])
def test_the_number_of_micro_batches_that_fits_is_advised(small, monkeypatch, error, limit, accumulate, advice):
    fits(monkeypatch, limit)
    config = dataclasses.replace(
        small, training=dataclasses.replace(small.training, accumulate=accumulate), resume=True
    )
    said = told(config, error)
    assert said.startswith("out of memory (")
    assert advice in said


def test_another_error_of_a_device_stays(small):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_told(small):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")


def program(temporary, output, reused):
    """A compiled program that takes this many bytes on each device."""
    found = {"temp_size_in_bytes": temporary, "output_size_in_bytes": output, "alias_size_in_bytes": reused}
    return types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**found))


def has_free(monkeypatch, memory, swap=0, devices=1, platform="cpu"):
    monkeypatch.setattr("mpjax.commands.out_of_memory.free_memory", lambda: memory)
    monkeypatch.setattr("mpjax.commands.out_of_memory.free_swap", lambda: swap)
    device = types.SimpleNamespace(platform=platform)
    monkeypatch.setattr("mpjax.commands.out_of_memory.jax.local_devices", lambda: [device] * devices)


@pytest.mark.parametrize(
    ("host", "fits"),
    [
        ({"memory": 2000}, True),
        ({"memory": 1999}, False),
        ({"memory": 1500, "swap": 500}, True),
        ({"memory": 5999, "devices": 3}, False),
        ({"memory": 10, "platform": "gpu"}, True),
    ],
)
def test_the_largest_program_has_to_fit_into_what_a_host_of_cpus_has_free(monkeypatch, host, fits):
    has_free(monkeypatch, **host)
    programs = [program(100, 0, 0), program(1900, 5100, 5000)]
    if fits:
        require_memory(Alone(), programs)
    else:
        with pytest.raises(MemoryError, match=r"^the step takes .* of the .* that are free$"):
            require_memory(Alone(), programs)


def test_processes_of_one_host_share_its_memory(monkeypatch):
    has_free(monkeypatch, 3999)
    two = types.SimpleNamespace(gather=lambda value: [value, "another", value])
    with pytest.raises(MemoryError, match="the step takes 4 kB of the 4 kB"):
        require_memory(two, [program(1000, 1000, 0)])


def test_a_run_that_cannot_fit_is_refused_before_its_first_step(small, monkeypatch, tmp_path):
    fits(monkeypatch, 13)
    monkeypatch.setattr("mpjax.commands.out_of_memory.free_memory", lambda: 1000)
    monkeypatch.setattr("mpjax.commands.out_of_memory.free_swap", lambda: 0)
    with pytest.raises(UsageError) as refused:
        run(dataclasses.replace(small, output_dir=str(tmp_path / "run")))
    said = str(refused.value)
    assert said.startswith("out of memory (the step takes ")
    assert "of the 1 kB that are free); write --training.accumulate 2, with which the step fits" in said
    assert not (tmp_path / "run").exists()
