"""What a run says that runs out of memory: settings that are estimated to fit."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from mpjax.config import Config
from mpjax.config.choices import AUTO
from mpjax.errors import UsageError, first_line


@contextlib.contextmanager
def memory_told(config: Config) -> Iterator[None]:
    """Raises UsageError with settings that fit in place of the error of a device, or of the host, without memory."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UsageError(f"out of memory ({first_line(error)}); {_advice(config)}") from error


def _advice(config: Config) -> str:
    from mpjax.commands.fit import fitted  # late: few runs need the plan's files

    asked = dataclasses.replace(config.training, accumulate=AUTO)
    try:
        found, _ = fitted(dataclasses.replace(config, training=asked, resume=False), say=lambda line: None)
    except (UsageError, jax.errors.JaxRuntimeError, MemoryError):
        return (
            f"no number of micro-batches of a batch of {config.data.batch_size} fits by the estimate; write a smaller "
            "--data.batch_size, --training.remat full, or a smaller model"
        )
    count = found.training.accumulate
    if count > config.training.accumulate:
        return f"write --training.accumulate {count}, with which the step fits by the estimate and learns the same"
    return (
        "by the estimate the step fits into what is free now: end other programs on the device, or write a smaller "
        "--data.eval_batch_size if it was an evaluation"
    )
