"""Splits the memory of a step by purpose, and finds the largest batch that fits."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from mpjax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device at a step's peak.

    Attributes:
      parameters: the model's parameters.
      optimizer: the optimizer state, including master weights.
      statistics: batch statistics and the moving average of the parameters.
      batch: the device's shard of the batch.
      temporary: buffers that live only while the step runs, mostly activations.
      extra: outputs that do not reuse an input's buffer: metrics, and a copy of the state if it is not donated.
    """

    parameters: int
    optimizer: int
    statistics: int
    batch: int
    temporary: int
    extra: int

    @property
    def total(self) -> int:
        """The sum of all attributes, in bytes."""
        return sum(dataclasses.astuple(self))


def memory_of(state: TrainState, batch: Mapping[str, Any], analysis: Any) -> Memory:
    """Splits the memory that a compiled step takes on one device by purpose. Nothing is allocated.

    Args:
      state: the abstract state that was compiled for, with its shardings.
      batch: the abstract batch, with its sharding.
      analysis: `compiled.memory_analysis()`.
    """
    return Memory(
        parameters=_bytes(state.params),
        optimizer=_bytes(state.opt_state) + _bytes(state.step),
        statistics=_bytes(state.stats) + _bytes(state.ema),
        batch=_bytes(batch),
        temporary=analysis.temp_size_in_bytes,
        extra=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    )


def held_bytes(state: TrainState, batch: Mapping[str, Any]) -> int:
    """The bytes that one device holds between steps: state and batch, as in `memory_of`, by their shardings."""
    return _bytes(state) + _bytes(batch)


def _bytes(tree: Any) -> int:
    """The bytes that one device holds of all arrays in a pytree, by their shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


ROUNDS = 5
"""Maximum number of compilations to verify the largest batch."""

NEAR = 0.9
"""A batch that fits and uses at least this fraction of the memory is taken as the largest."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """The largest batch that fits.

    Attributes:
      batch: examples in the batch, over all devices; 0 if no batch fits.
      compiled: whether a batch of that size was compiled. Otherwise the size is an estimate.
    """

    batch: int
    compiled: bool


def other_batch(batch: int, step: int) -> int:
    """Chooses the second batch size to compile: half of the first, or twice the first if half rounds down to 0.

    Args:
      batch: the first batch size, a multiple of `step`.
      step: the number that batch sizes are multiples of.
    """
    half = batch // 2 // step * step
    return half or 2 * batch


def largest_batch(points: Mapping[int, int], limit: int, *, step: int, scaled: Collection[int] = ()) -> Fit:
    """Estimates the largest batch that fits, with a line through two known batches.

    These are two batches next to each other in size: the first two of which the larger does not fit or, if all fit, the
    largest two. The result is rounded down to a multiple of `step`.

    >>> largest_batch({100: 2000, 200: 3000}, 4000, step=8)
    Fit(batch=296, compiled=False)

    Args:
      points: peak bytes by batch size, for at least two batches.
      limit: bytes available.
      step: the number that batch sizes are multiples of.
      scaled: the batch sizes in `points` whose bytes are an estimate. The result is `compiled` if its batch is another
        one in `points`.

    Raises:
      ValueError: memory does not grow with the batch.
    """
    known = sorted(points.items())
    pairs = list(itertools.pairwise(known))
    # The first pair whose larger batch does not fit, or the last pair if all fit.
    (low, low_bytes), (high, high_bytes) = next((pair for pair in pairs if pair[1][1] > limit), pairs[-1])
    slope = (high_bytes - low_bytes) / (high - low)
    if slope <= 0:
        raise ValueError(f"{low} examples take {low_bytes} bytes, {high} take {high_bytes}: memory does not grow")
    batch = max(int(low + (limit - low_bytes) / slope) // step * step, 0)
    return Fit(batch, batch in points and batch not in scaled)


def verified_batch(
    points: Mapping[int, int],
    limit: int,
    memory_of: Callable[[int], int],
    *,
    step: int,
    scaled: Collection[int] = (),
) -> Fit:
    """Finds the largest batch that fits by compiling each estimate of `largest_batch` and refining the line with it.

    The search stops when a compiled batch fits and uses at least `NEAR` of the limit, when memory no longer grows with
    the batch, or after `ROUNDS` compilations; also when the estimate is 0 or a batch that is compiled already. The
    result is the last compiled batch that fits; if none, an estimate, which is 0 if the smallest batch does not fit and
    the next takes no more.

    Args:
      points: as in `largest_batch`.
      limit: as in `largest_batch`.
      memory_of: a function from batch size to peak bytes that compiles the step.
      step: as in `largest_batch`.
      scaled: as in `largest_batch`.

    Raises:
      ValueError: as `largest_batch`, for `points`.
    """
    points, scaled = dict(points), set(scaled)
    fitting = None
    for _ in range(ROUNDS):
        estimate = largest_batch(points, limit, step=step, scaled=scaled)
        if estimate.compiled or not estimate.batch:
            return estimate
        points[estimate.batch] = memory_of(estimate.batch)
        scaled.discard(estimate.batch)
        if points[estimate.batch] <= limit:
            fitting = Fit(estimate.batch, compiled=True)
        if NEAR * limit <= points[estimate.batch] <= limit or not _grows(points):
            break
    try:
        return fitting or largest_batch(points, limit, step=step, scaled=scaled)
    except ValueError:  # not even the smallest batch fits, and the line to the next does not fall to the limit
        return Fit(0, compiled=False)


def _grows(points: Mapping[int, int]) -> bool:
    """True if bytes strictly grow with the batch size. They may not: XLA rematerializes activations that do not fit."""
    return all(low < high for low, high in itertools.pairwise(points[batch] for batch in sorted(points)))
