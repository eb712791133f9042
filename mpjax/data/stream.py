"""Yields batches that are a pure function of an integer position, so that a run resumes exactly where it stopped.

`batches.py` chooses the stream of a data set.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from mpjax.data.order import Order
from mpjax.data.orientation import Alternating
from mpjax.data.stacking import Arrays
from mpjax.errors import UsageError


Batch = dict[str, np.ndarray]
"""Maps each field of a data set to an array [B, ...]; evaluation batches also have `weight` [B], float32."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The contiguous rows of every batch that one of several processes reads, in the layout of a sharded array.

    Args:
      index: the number of the block of rows. Processes that divide a model between them read the same block.
      count: the number of blocks; the global batch does not depend on it.
    """

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> slice:
        """The rows of a batch that this process reads.

        Raises:
          UsageError: the batch does not divide among the processes.

        >>> Share(index=1, count=2).rows(8)
        slice(4, 8, None)
        """
        if batch_size % self.count:
            raise UsageError(
                f"a batch of {batch_size} examples does not divide among {self.count} processes: "
                f"take a multiple of {self.count}"
            )
        size = batch_size // self.count
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = Share()


class Batches(Protocol):
    """An endless stream of shuffled batches. Batch p is the same from any starting position."""

    @property
    def batch_size(self) -> int:
        """The number of examples per batch."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in an epoch."""
        ...

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1`, and so on."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class BatchesInMemory:
    """`Batches` gathered from arrays in memory.

    Args:
      arrays: an array [N, ...] for each field.
      order: the examples of each batch, over all processes.
      share: the part of each batch that this process reads.
      orientation: chooses the mirrored images of a batch. None: the step draws them.
    """

    arrays: Arrays
    order: Order
    share: Share = WHOLE
    orientation: Alternating | None = None

    @property
    def batch_size(self) -> int:
        """The number of examples per batch, over all processes."""
        return self.order.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in an epoch."""
        return self.order.steps_per_epoch

    @property
    def bytes(self) -> int:
        """The size of the whole split in bytes."""
        return sum(values.nbytes for values in self.arrays.values())

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1`, and so on."""
        for chosen, oriented in self.rows_from(position):
            yield {name: values[chosen] for name, values in self.arrays.items()} | oriented

    def rows_from(self, position: int) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yields, for the same batches as `from_position`, the example indices and the fields that depend on the epoch.

        The indices are int64 [B], for the rows that this process reads. The fields are `mirrored`, or none.
        """
        rows = self.share.rows(self.batch_size)
        for number in itertools.count(position):
            chosen = self.order.rows(number)[rows]
            yield chosen, self.orientation.of(chosen, self.order.epochs(number)[rows]) if self.orientation else {}


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedBatches:
    """`Batches` read and decoded by the threads of grain.

    Args:
      dataset: a `grain.MapDataset` of all batches, endless.
      batch_size: examples per batch.
      steps_per_epoch: full batches in an epoch.
      workers: the number of threads; 0 reads each batch when it is requested.
    """

    dataset: Any
    batch_size: int
    steps_per_epoch: int
    workers: int

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1`, and so on."""
        return iter(prefetched(self.dataset[position:], self.workers))


@dataclasses.dataclass(frozen=True, eq=False)
class EvalBatches:
    """Batches of a split in order, one pass per iteration. Every batch has the full size.

    The last batch is padded with examples of zeros and weight 0, so that one compiled program takes all batches and
    weighted sums count every example once.

    Args:
      parts: a function that returns the batches of all processes, without padding.
      size: the number of examples.
      batch_size: the number of examples per batch, over all processes.
      share: the part of each batch that this process reads.
      arrays: an array [N, ...] for each field of a split in memory; None for a streamed split.
    """

    parts: Callable[[], Iterable[Batch]]
    size: int
    batch_size: int
    share: Share = WHOLE
    arrays: Arrays | None = None

    def __len__(self) -> int:
        return math.ceil(self.size / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.parts():
            rows = self.share.rows(self.batch_size)
            yield {field: values[rows] for field, values in padded_batch(batch, self.batch_size).items()}


def padded_batch(part: Batch, batch_size: int) -> Batch:
    """Pads a batch with rows of zeros, and adds `weight`, float32 [B]: 1 for the rows of `part`, 0 for padding."""
    size = len(next(iter(part.values())))
    weighted = {**part, "weight": np.ones(size, np.float32)}
    return {field: _filled(values, batch_size - size) for field, values in weighted.items()}


def _filled(values: np.ndarray, missing: int) -> np.ndarray:
    """Pads `values` with `missing` rows of zeros."""
    return np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)]) if missing else values


def prefetched(dataset: Any, workers: int) -> Iterable[Batch]:
    """Yields the batches of a `grain.MapDataset` in order, read ahead by `workers` threads; 0: none is read ahead."""
    import grain

    # Each thread reads whole batches. Grain's default of 16 threads contends for the interpreter lock.
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers))
