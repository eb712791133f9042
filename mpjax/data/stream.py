"""Batches as pure functions of an integer position, so that a run resumes exactly where it stopped."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.prepare import normalisation
from mpjax.data.contract import require_examples
from mpjax.data.examples import Source
from mpjax.data.fields import Image
from mpjax.data.read import Arrays, fits_in_memory, read_all, read_batch, reader
from mpjax.errors import UsageError


Batch = dict[str, np.ndarray]
"""The fields of a data set, [B, ...] each; in evaluation also `weight` [B], float32."""


class Batches(Protocol):
    """Shuffled batches without end. Batch number p is the same wherever the reading started."""

    @property
    def batch_size(self) -> int:
        """Examples per batch."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in the split; the examples left over are other ones in each epoch."""
        ...

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1`, and so on."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class BatchesInMemory:
    """`Batches` gathered from arrays.

    Args:
      arrays: by field, [N, ...].
      batch_size: examples per batch.
      seed: of the order.
    """

    arrays: Arrays
    batch_size: int
    seed: int

    @property
    def size(self) -> int:
        """Examples in the split."""
        return len(next(iter(self.arrays.values())))

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in the split."""
        return self.size // self.batch_size

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1`, and so on."""
        epoch, step = divmod(position, self.steps_per_epoch)
        while True:
            order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.size)
            for start in range(step * self.batch_size, self.steps_per_epoch * self.batch_size, self.batch_size):
                chosen = order[start : start + self.batch_size]
                yield {name: values[chosen] for name, values in self.arrays.items()}
            epoch, step = epoch + 1, 0


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedBatches:
    """`Batches` that grain's threads read and decode.

    Args:
      dataset: a `grain.MapDataset` of all batches, endless.
      batch_size: examples per batch.
      steps_per_epoch: full batches in the split.
      workers: threads; 0: none, batches are read when they are asked for.
    """

    dataset: Any
    batch_size: int
    steps_per_epoch: int
    workers: int

    def from_position(self, position: int) -> Iterator[Batch]:
        """Yields batches number `position`, `position + 1`, and so on."""
        return iter(_prefetched(self.dataset[position:], self.workers))


@dataclasses.dataclass(frozen=True, eq=False)
class EvalBatches:
    """One pass over a split, in order, as often as it is iterated; every batch has the full size.

    The last one is filled up with zeros (black images of class 0) of weight 0, so that one compiled program serves all
    and weighted sums count every example once.
    """

    parts: Callable[[], Iterable[Batch]]
    size: int
    batch_size: int

    def __len__(self) -> int:
        return math.ceil(self.size / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for part in self.parts():
            size = len(next(iter(part.values())))
            missing = self.batch_size - size
            weighted = {**part, "weight": np.ones(size, np.float32)}
            yield {
                field: np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
                if missing
                else values
                for field, values in weighted.items()
            }


def train_batches(source: Source, config: Data, seed: int) -> Batches:
    """Shuffled batches of `source.train`, from memory where the set fits into `config.in_memory_mb`.

    Args:
      source: the data set.
      config: batch and image size, memory and threads.
      seed: of the order and of the random parts that are cut out.

    Raises:
      UsageError: the split is smaller than a batch, or an example is not what `contract.conform` wants. A streamed
        set raises the latter when it comes to that example.
    """
    size, batch_size = len(source.train), config.batch_size
    _check_numbers(config)
    require_examples(config.train_split, size)
    if batch_size > size:
        raise UsageError(
            f"split '{config.train_split}' of '{source.name}' has {size} examples, fewer than one batch of "
            f"{batch_size}; write --data.batch_size {size} or less"
        )
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed: got {seed}; wanted 0 to 2**32 - 1, as in --seed 0")
    read = reader(source, config, training=True)
    for field in read.fields.values():
        if isinstance(field, Image):
            normalisation(config, field.shape[2])  # refused here, before anything is written
    if fits_in_memory(source, config, read):
        return BatchesInMemory(read_all(source.train, read, config.workers), batch_size, seed)
    import grain

    indices = grain.MapDataset.range(size).seed(seed).shuffle().batch(batch_size, drop_remainder=True).repeat()
    batches = indices.random_map(lambda chosen, rng: read_batch(source.train, chosen, read, rng))
    return StreamedBatches(batches, batch_size, size // batch_size, config.workers)


def eval_batches(source: Source, config: Data) -> EvalBatches:
    """All of `source.test` in order, in batches of `config.eval_batch_size` with a `weight` [B] of 1 or 0.

    Raises:
      UsageError: the split is empty, or an example is not what `contract.conform` wants.
    """
    size, batch_size = len(source.test), config.eval_batch_size
    _check_numbers(config)
    require_examples(config.test_split, size)
    read = reader(source, config, training=False)
    if fits_in_memory(source, config, read):
        whole = read_all(source.test, read, config.workers)

        def slices() -> Iterator[Batch]:
            for start in range(0, size, batch_size):
                yield {name: values[start : start + batch_size] for name, values in whole.items()}

        return EvalBatches(slices, size, batch_size)
    import grain

    batches = grain.MapDataset.range(size).batch(batch_size).map(lambda chosen: read_batch(source.test, chosen, read))
    return EvalBatches(lambda: _prefetched(batches, config.workers), size, batch_size)


def _check_numbers(config: Data) -> None:
    for field, least in (("batch_size", 1), ("eval_batch_size", 1), ("image_size", 0), ("workers", 0)):
        if (value := getattr(config, field)) < least:
            raise UsageError(f"data.{field}: got {value}; wanted at least {least}, as in --data.{field} {least}")


def _prefetched(dataset: Any, workers: int) -> Iterable[Batch]:
    import grain

    # Each thread makes whole batches; grain's default of 16 threads fights for the interpreter.
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers))
