"""A run that is out of memory says what fits."""

import dataclasses

import jax
import pytest

from mpjax.commands.out_of_memory import memory_told
from mpjax.errors import UsageError


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
