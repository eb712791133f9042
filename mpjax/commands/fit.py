"""Fits a run into memory: replaces `auto` by a batch size or a number of micro-batches."""

import functools
import socket
from collections.abc import Callable
from typing import Any

import jax

from mpjax.commands.jax_settings import set_up_jax
from mpjax.commands.plan import planned_step
from mpjax.config.choices import AUTO
from mpjax.config.folders import data_folder
from mpjax.config.schema import Config, with_settings
from mpjax.data.example_reader import batch_fields
from mpjax.data.open import open_source
from mpjax.data.order import epoch_size
from mpjax.errors import UsageError
from mpjax.plan.here import batch_that_fits, memory_here, memory_limit, micro_batches_that_fit, needed
from mpjax.plan.table import size
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh
from mpjax.training.precision_plan import plan_precision


def fitted(
    config: Config, gather: Callable[[Any], list] = lambda value: [value], say: Callable[[str], object] = print
) -> tuple[Config, str]:
    """Replaces `auto` in the batch size or the number of micro-batches by a number; returns the settings and a message.

    It finds the largest batch (a power of two times devices and micro-batches), or the smallest number of micro-batches
    (a power of two), whose step fits into device memory. The step is compiled for the present devices in a few sizes,
    and JAX is configured by `set_up_jax`. Call it only if `is_auto(config)`; otherwise it would replace the number of
    micro-batches.

    Args:
      config: the settings of the run.
      gather: a function from a value of this process to the list of the values of all processes, which call it
        together; by default of this process alone. The device with the least memory counts.
      say: receives a line about each tried size, because a large model takes minutes to compile.

    Raises:
      UsageError: both settings are `auto`, the run is resumed, nothing fits, or the settings are invalid.
    """
    batch, accumulate = config.data.batch_size, config.training.accumulate
    if batch == accumulate == AUTO:
        raise UsageError(
            "--data.batch_size auto with --training.accumulate auto: write a number for one of them; a batch size is "
            "a matter of learning, and micro-batches make it fit"
        )
    if config.resume:
        flag = "--data.batch_size auto" if batch == AUTO else "--training.accumulate auto"
        raise UsageError(f"{flag} with --resume: the run has its number already; leave it out")
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)
    mesh = make_mesh(**config.mesh.sizes)
    devices = Layout(mesh).shares
    here = socket.gethostname()
    limit = min(gather(memory_limit(jax.local_devices(), processes=gather(here).count(here))))
    least = {
        "data.batch_size": devices * accumulate if batch == AUTO else batch,
        "training.accumulate": 1 if accumulate == AUTO else accumulate,
    }
    smallest = with_settings(config, least)
    Layout(mesh).batch(size=smallest.data.batch_size, accumulate=smallest.training.accumulate)  # checks that it divides
    source = open_source(smallest.data, data_folder(config), config.task)
    fields = batch_fields(source, smallest.data)
    if config.training.steps_per_call > 1:
        limit -= config.data.on_device_mb * 2**20  # the data set may also be on the device

    @functools.cache
    def bytes_of(batch: int, accumulate: int) -> int:
        sized = with_settings(config, {"data.batch_size": batch, "training.accumulate": accumulate})
        nbytes = needed(memory_here(planned_step(sized, fields), mesh))
        suffix = f" in {accumulate} micro-batches" if accumulate > 1 else ""
        say(f"a batch of {batch}{suffix} takes {size(nbytes)} of {size(limit)}")
        return nbytes

    if batch == AUTO:
        step = devices * accumulate
        # The size of a generated set, which is made in memory, follows from the batch size.
        most = _GENERATED if str(config.data.name).startswith("synthetic:") else epoch_size(source)
        if step > most:
            raise UsageError(
                f"--data.batch_size auto: the smallest batch of this mesh and --training.accumulate {accumulate} has "
                f"{step} examples, an epoch has {most:,}; write a smaller --training.accumulate"
            )
        batch = batch_that_fits(most, limit, lambda count: bytes_of(count, accumulate), step=step)
        number, flag, tried = batch, f"--data.batch_size {batch}", f"--data.batch_size auto: a batch of {step}"
    else:
        accumulate = micro_batches_that_fit(batch, limit, lambda count: bytes_of(batch, count), devices=devices)
        number, flag = accumulate, f"--training.accumulate {accumulate}"
        tried = f"--training.accumulate auto: a batch of {batch} in any number of micro-batches"
    if not number:
        raise UsageError(
            f"{tried} does not fit into the {size(limit)} that a run may take of each device; choose a smaller model "
            "or shorter examples"
        )
    memory = size(bytes_of(batch, accumulate))
    kind = jax.devices()[0].device_kind
    message = f"{flag} was found: the step takes {memory} of the {size(limit)} that it may on each {kind}"
    return with_settings(config, {"data.batch_size": batch, "training.accumulate": accumulate}), message


_GENERATED = 4096
"""The largest batch to try, in examples, for a data set of generated images (`synthetic:`)."""
