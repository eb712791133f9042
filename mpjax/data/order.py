"""Assigns training examples to batches: a pure function of the seed and the position of a batch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mpjax.data.examples import Source


BLOCK = 1000
"""The number of examples of a mixture in which each set has exactly its share, in whole examples."""


class Order(Protocol):
    """The examples of every batch, by number. Examples of several sets are numbered one set after the other."""

    @property
    def batch_size(self) -> int:
        """The number of examples per batch."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in an epoch."""
        ...

    def rows(self, position: int) -> np.ndarray:
        """The numbers of the examples of batch number `position`, int64 [B]."""
        ...

    def epochs(self, position: int) -> np.ndarray:
        """The number of earlier passes through its set, for each example of batch number `position`, int64 [B]."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Shuffled:
    """The order of one set, reshuffled in each epoch. An epoch drops the examples that fill no whole batch."""

    size: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in the set."""
        return self.size // self.batch_size

    @functools.cached_property
    def _permutation(self) -> Callable[[int], np.ndarray]:
        return _permutations(self.size, lambda epoch: np.random.Philox(key=[self.seed, epoch]))

    def rows(self, position: int) -> np.ndarray:
        """The numbers of the examples of batch number `position`, int64 [B]."""
        epoch, step = divmod(position, self.steps_per_epoch)
        return self._permutation(epoch)[step * self.batch_size : (step + 1) * self.batch_size]

    def epochs(self, position: int) -> np.ndarray:
        """The epoch of batch number `position`, from 0, once for each of its examples, int64 [B]."""
        return np.full(self.batch_size, position // self.steps_per_epoch)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """The order of a mixture of sets.

    Each block of `BLOCK` examples has exactly `counts` examples of each set, at random places. The number of a set's
    examples before a block is therefore known, and each set goes through its own epochs: no example repeats before all
    others of its set have been used.

    Args:
      sizes: the number of examples of each set.
      counts: the number of examples of each set in a block.
      batch_size: the number of examples per batch.
      seed: the seed of the shuffles.
    """

    sizes: Sequence[int]
    counts: Sequence[int]
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in one pass through the first set."""
        return _pass_through_first(self.sizes, self.counts) // self.batch_size

    @functools.cached_property
    def _permutation(self) -> list[Callable[[int], np.ndarray]]:
        def seeded(index: int) -> Callable[[int], np.random.BitGenerator]:
            return lambda epoch: np.random.PCG64((self.seed, 1 + index, epoch))

        return [_permutations(size, seeded(index)) for index, size in enumerate(self.sizes)]

    @functools.cached_property
    def _block(self) -> Callable[[int], np.ndarray]:
        return functools.lru_cache(maxsize=4)(self._computed_block)  # threads may read consecutive blocks

    def _computed_block(self, number: int) -> np.ndarray:
        """The numbers of the examples of a block, and the epoch of each in its set, int64 [2, BLOCK]."""
        shuffle = np.random.Generator(np.random.PCG64((self.seed, 0, number)))
        chosen = shuffle.permutation(np.repeat(np.arange(len(self.sizes)), self.counts))
        block = np.empty((2, BLOCK), np.int64)
        start = 0
        for index, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            epochs, places = np.divmod(number * count + np.arange(count), size)
            passes = [self._permutation[index](epoch)[places[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
            block[:, chosen == index] = start + np.concatenate(passes), epochs
            start += size
        return block

    def _batch(self, position: int) -> np.ndarray:
        begin, end = position * self.batch_size, (position + 1) * self.batch_size
        first = begin // BLOCK
        blocks = [self._block(number) for number in range(first, -(-end // BLOCK))]
        return np.concatenate(blocks, axis=1)[:, begin - first * BLOCK : end - first * BLOCK]

    def rows(self, position: int) -> np.ndarray:
        """The numbers of the examples of batch number `position`, int64 [B]."""
        return self._batch(position)[0]

    def epochs(self, position: int) -> np.ndarray:
        """The epoch, in its own set, of each example of batch number `position`, int64 [B]."""
        return self._batch(position)[1]


def _permutations(size: int, bits: Callable[[int], np.random.BitGenerator]) -> Callable[[int], np.ndarray]:
    """Builds a function from an epoch to a random order of `size` examples, int64 [size]; it caches the last two.

    `bits` builds the random bit generator of an epoch.
    """

    @functools.lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        return np.random.Generator(bits(epoch)).permutation(size)

    return permutation


def order_of(source: Source, batch_size: int, seed: int) -> Order:
    """The order in which a run trains on a set, or on the mixture whose first set is `source`."""
    if not source.mix:
        return Shuffled(len(source.train), batch_size, seed)
    return Mixed([len(member.train) for member in source.trained_on], counts_of(_shares(source)), batch_size, seed)


def epoch_size(source: Source) -> int:
    """The number of examples in an epoch: all of a set.

    In a mixture, it is the number of examples, of all sets, that one pass through the first set takes.
    """
    return _pass_through_first([len(member.train) for member in source.trained_on], counts_of(_shares(source)))


def _pass_through_first(sizes: Sequence[int], counts: Sequence[int]) -> int:
    return sizes[0] * BLOCK // counts[0]


def _shares(source: Source) -> list[float]:
    return [portion.share for portion in source.mix]


def counts_of(shares: Sequence[float]) -> list[int]:
    """Divides `BLOCK` examples among the sets of a mixture: the number of examples of each set, the first set first.

    `shares` has the shares of all sets but the first, which gets the rest. The examples left over by rounding down go
    to the largest remainders, one each.

    >>> counts_of([0.3, 1 / 3])
    [367, 300, 333]
    """
    exact = [BLOCK * share for share in (1 - sum(shares), *shares)]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in itertools.islice(by_remainder, BLOCK - sum(counts)):
        counts[index] += 1
    return counts
