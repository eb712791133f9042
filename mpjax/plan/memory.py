"""What a step takes of a device's memory, by what it is for, and the largest batch that fits."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpjax.plan.step import Step


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device at a step's peak.

    Attributes:
      parameters: of the model.
      optimizer: of the optimizer's state, master weights among it.
      statistics: batch statistics and the moving average of the parameters.
      batch: what the step is given to learn from.
      temporary: what is kept while the step runs: activations above all.
      extra: results that take no argument's place: metrics, and a second copy of the state if it were not donated.
    """

    parameters: int
    optimizer: int
    statistics: int
    batch: int
    temporary: int
    extra: int

    @property
    def total(self) -> int:
        """Of all."""
        return sum(dataclasses.astuple(self))


def memory_of(step: Step, found: Any, devices: int) -> Memory:
    """What XLA has laid out for one device.

    Args:
      step: what was compiled.
      found: `compiled.memory_analysis()`.
      devices: that share the batch; each has the whole state.
    """
    state = step.state
    return Memory(
        parameters=_bytes(state.params),
        optimizer=_bytes(state.opt_state) + _bytes(state.step),
        statistics=_bytes(state.stats) + _bytes(state.ema),
        batch=_bytes(dict(step.batch)) // devices,
        temporary=found.temp_size_in_bytes,
        extra=found.output_size_in_bytes - found.alias_size_in_bytes,
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


ROUNDS = 5
"""Batches that are compiled at the most to verify one."""

NEAR = 0.9
"""Share of the memory from which on a batch that fits counts as the largest."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
      batch: the largest that fits; 0 if none does.
      compiled: whether a batch of that size was compiled; else it follows from the line.
    """

    batch: int
    compiled: bool


def other_batch(batch: int, step: int) -> int:
    """A second batch for the line: half of the first, or twice it where half is none.

    Args:
      batch: the first, a multiple of `step`.
      step: what batches are multiples of.
    """
    half = batch // 2 // step * step
    return half or 2 * batch


def largest_batch(points: Mapping[int, int], limit: int, *, step: int) -> Fit:
    """By the line through the two batches next to the limit.

    Args:
      points: peak bytes of two batches or more.
      limit: bytes that there are.
      step: what batches are multiples of.
    """
    known = sorted(points.items())
    pairs = list(itertools.pairwise(known))
    # The first pair whose larger batch is too large; else the last pair.
    (low, low_bytes), (high, high_bytes) = next((pair for pair in pairs if pair[1][1] > limit), pairs[-1])
    slope = (high_bytes - low_bytes) / (high - low)
    if slope <= 0:
        raise ValueError(f"{high} examples take {high_bytes} bytes, {low} take {low_bytes}: no line that grows")
    found = max(int(low + (limit - low_bytes) / slope) // step * step, 0)
    return Fit(found, found in points)


def verified_batch(points: Mapping[int, int], limit: int, memory_of: Callable[[int], int], *, step: int) -> Fit:
    """As `largest_batch`, but what is found is compiled, and mends the line until it fits and fills the memory.

    Args:
      points: as there.
      limit: as there.
      memory_of: batch to peak bytes, by compiling.
      step: as there.
    """
    points = dict(points)
    fitting = None
    for _ in range(ROUNDS):
        found = largest_batch(points, limit, step=step)
        if found.compiled or not found.batch:
            return found
        points[found.batch] = memory_of(found.batch)
        if points[found.batch] <= limit:
            fitting = Fit(found.batch, compiled=True)
        if NEAR * limit <= points[found.batch] <= limit or not _grows(points):
            break
    return fitting or largest_batch(points, limit, step=step)


def _grows(points: Mapping[int, int]) -> bool:
    """Whether more examples take more memory throughout; they need not where XLA computes again what does not fit."""
    return all(low < high for low, high in itertools.pairwise(points[batch] for batch in sorted(points)))
