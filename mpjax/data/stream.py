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
    """The contiguous block of rows of every global batch that one of several processes reads, as in a sharded array.

    Args:
      index: the number of the block, from 0. Processes that shard one copy of a model between them read the same block.
      count: the number of blocks of equal size; the global batch does not depend on it.
    """

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> slice:
        """Computes the slice of rows that this process reads of a global batch of `batch_size` rows.

        Raises:
          UsageError: `batch_size` is not a multiple of `count`.

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
"""All rows of every batch: a single process."""


class Batches(Protocol):
    """An endless stream of shuffled batches. Batch number p is the same from any starting position."""

    @property
    def batch_size(self) -> int:
        """The number of examples per global batch, over all processes."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """The number of full global batches in an epoch; a smaller rest is left out."""
        ...

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1` and so on, without end; batches are numbered from 0.

        Each batch has only the rows that this process reads.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class BatchesInMemory:
    """`Batches` gathered from arrays in memory.

    Args:
      arrays: an array [N, ...] of all examples for each field.
      order: the numbers of the examples of each global batch.
      share: the rows of each global batch that this process yields.
      orientation: chooses the images to mirror, as the field `mirrored` of a batch. None: batches have no such field,
        and the training step draws the images to mirror at random.
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
        """The size in bytes of the arrays of all examples."""
        return sum(values.nbytes for values in self.arrays.values())

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1` and so on, without end; batches are numbered from 0.

        Each batch has only the rows that this process reads.

        Raises:
          UsageError: the batch does not divide among the processes, when the first batch is requested.
        """
        for chosen, oriented in self.rows_from(position):
            yield {name: values[chosen] for name, values in self.arrays.items()} | oriented

    def rows_from(self, position: int) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yields, for the same batches as `from_position`, the indices into `arrays` and the fields of the epoch.

        The indices are int64, one for each row that this process reads. The fields of the epoch are a dict with
        `mirrored`, or an empty dict without `orientation`.
        """
        rows = self.share.rows(self.batch_size)
        for number in itertools.count(position):
            chosen = self.order.example_numbers(number)[rows]
            yield chosen, self.orientation.of(chosen, self.order.epochs(number)[rows]) if self.orientation else {}


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedBatches:
    """`Batches` that threads of grain read from disk and decode ahead of time.

    Args:
      dataset: an endless `grain.MapDataset`, whose element p is batch number p with the rows of this process.
      batch_size: the number of examples per global batch, over all processes.
      steps_per_epoch: the number of full batches in an epoch.
      workers: the number of threads; 0 reads each batch when it is requested.
    """

    dataset: Any
    batch_size: int
    steps_per_epoch: int
    workers: int

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1` and so on, without end; earlier batches are not read.

        Each batch has only the rows that this process reads. Each call starts `workers` new threads.
        """
        return iter(prefetched(self.dataset[position:], self.workers))


@dataclasses.dataclass(frozen=True, eq=False)
class EvalBatches:
    """The batches of a split in order, each with the full size. Every `iter` starts a new pass; `len` counts batches.

    The field `weight`, float32 [B], is 1 for an example. The last batch is padded with zeros of weight 0, so that one
    compiled program takes all batches and weighted sums count every example once.

    Args:
      parts: a function that returns the global batches of one pass, without `weight`; the last may be smaller.
      size: the number of examples.
      batch_size: the number of examples per global batch, over all processes.
      share: the rows of each padded global batch that this process yields.
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


def padded_batch(batch: Batch, batch_size: int) -> Batch:
    """Pads each field of a batch with zeros to `batch_size` rows, and adds `weight`, float32 [batch_size].

    The weight is 1 for the rows of `batch` and 0 for padding. `batch` is not changed.
    """
    size = len(next(iter(batch.values())))
    weighted = {**batch, "weight": np.ones(size, np.float32)}
    return {field: _filled(values, batch_size - size) for field, values in weighted.items()}


def _filled(values: np.ndarray, missing: int) -> np.ndarray:
    """Appends `missing` rows of zeros to `values`; 0 returns `values` itself."""
    return np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)]) if missing else values


def prefetched(dataset: Any, workers: int) -> Iterable[Batch]:
    """Iterates over the batches of a `grain.MapDataset` in order; `workers` threads read up to 2 * `workers` ahead.

    With 0 workers, each batch is read when it is requested.
    """
    import grain

    # Each thread reads whole batches. Grain's default of 16 threads contends for the interpreter lock.
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers))
