"""Finds the batch that fits on the present devices: compiles the run's own step for them and compares memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from mpjax.plan.compiled import PlannedStep
from mpjax.plan.memory import Memory, largest_batch, memory_of
from mpjax.plan.system_memory import free_memory
from mpjax.training.escaped import trace


MEMORY_FRACTION = {"cpu": 0.5}
"""The fraction of a device's free memory that a step may take, by platform; `_MEMORY_FRACTION` for others.

The rest is for evaluation, fragmentation and, on a CPU, other programs.
"""

_MEMORY_FRACTION = 0.85

WAITING_BATCHES = 8
"""The number of batches that wait on the device, besides the batch of the step, because the host runs ahead."""


def memory_limit(devices: Sequence[Any], *, processes: int = 1) -> int:
    """The bytes that a step may take on one of this process's devices: `MEMORY_FRACTION` of its free memory now.
    Devices that report no limit of their own, such as CPUs, divide the free memory of the machine equally.

    Args:
      devices: the devices of this process, all of the same kind; only the first is asked.
      processes: the number of processes on this machine, which divide its memory. It does not matter for devices with
        memory of their own, such as GPUs.
    """
    device = devices[0]
    fraction = MEMORY_FRACTION.get(device.platform, _MEMORY_FRACTION)
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(fraction * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    return int(fraction * free_memory()) // (len(devices) * processes)


def memory_here(step: PlannedStep, mesh: Mesh) -> Memory:
    """Compiles a step for a mesh of present devices, without running it; returns the memory that it takes on each."""
    with step.x64_if_float64():
        train_step, arguments = step.on(mesh)
        compiled = trace(train_step, *arguments).lower().compile(step.compiler_options(mesh))
    return memory_of(*arguments, compiled.memory_analysis())


def needed(memory: Memory) -> int:
    """The bytes that a run takes on a device: of a step, and of the `WAITING_BATCHES` for later steps."""
    return memory.total + WAITING_BATCHES * memory.batch


def batch_that_fits(most: int, limit: int, bytes_of: Callable[[int], int], *, step: int) -> int:
    """Finds the largest batch of `step` times a power of two, up to `most`, that takes at most `limit` bytes.

    It compiles about four batch sizes, each once.

    Args:
      most: the largest batch to try, such as the number of examples.
      limit: bytes available.
      bytes_of: a function from batch size to the bytes of the step, which compiles it.
      step: the smallest batch: all devices times all micro-batches.

    Returns:
      The batch; 0 if `step` examples do not fit, or exceed `most`.
    """
    bytes_of = functools.cache(bytes_of)
    size = _power_of_two(min(most, _FIRST * step), step)
    if not size:
        return 0
    if 2 * size <= most and bytes_of(2 * size) > bytes_of(size):  # else so small that workspaces outweigh it
        points = {tried: bytes_of(tried) for tried in (size, 2 * size)}
        size = _power_of_two(min(largest_batch(points, limit, step=step).batch, most), step) or step
    while 2 * size <= most and bytes_of(size) <= limit and bytes_of(2 * size) <= limit:
        size *= 2
    while size and bytes_of(size) > limit:
        size = _power_of_two(size // 2, step)
    return size


_FIRST = 8


def _power_of_two(most: int, step: int) -> int:
    """The largest number up to `most` that is `step` times a power of two; 0 if `most` is less than `step`."""
    return step * 2 ** ((most // step).bit_length() - 1) if most >= step else 0


def micro_batches_that_fit(batch: int, limit: int, bytes_of: Callable[[int], int], *, devices: int) -> int:
    """Finds how many micro-batches a batch needs to take at most `limit` bytes: tries 1, 2, 4 and so on.

    Args:
      batch: examples of the whole batch, over all devices.
      limit: bytes available.
      bytes_of: a function from the number of micro-batches to the bytes of the step, which compiles it.
      devices: the number of devices that share a batch.

    Returns:
      The number of micro-batches; 0 if none fits before the batch can no longer be divided over all devices.
    """
    count = 1
    while batch % (count * devices) == 0:
        if bytes_of(count) <= limit:
            return count
        count *= 2
    return 0
