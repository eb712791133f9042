"""Which training examples are in which batch? A pure function of the seed and the position of a batch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mpjax.data.examples import Source


BLOCK = 1000
"""The length of the blocks of a mixture: each set has exactly its share of every block, in whole examples."""


class Order(Protocol):
    """The numbers of the examples in every batch, endless: positions of batches continue from epoch to epoch.

    Examples are numbered from 0. In a mixture they are numbered through the first set, then the second, and so on.
    """

    @property
    def batch_size(self) -> int:
        """The number of examples per global batch, over all processes."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in an epoch; a smaller rest is left out."""
        ...

    def example_numbers(self, position: int) -> np.ndarray:
        """Computes the numbers of the examples in the batch at `position`, counted from 0, int64 [B]."""
        ...

    def epochs(self, position: int) -> np.ndarray:
        """Computes the epoch, from 0 and in its own set, of each example of the batch at `position`, int64 [B]."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Shuffled:
    """The `Order` of one set, which is shuffled anew in each epoch.

    An epoch leaves out the last examples of its shuffle if they fill no whole batch.

    Args:
      size: the number of examples of the set.
      batch_size: the number of examples per batch.
      seed: the seed of the shuffles.
    """

    size: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in one pass through the set."""
        return self.size // self.batch_size

    @functools.cached_property
    def _permutation(self) -> Callable[[int], np.ndarray]:
        return _permutations(self.size, lambda epoch: np.random.Philox(key=[self.seed, epoch]))

    def example_numbers(self, position: int) -> np.ndarray:
        """Computes the numbers of the examples in the batch at `position`, counted from 0, int64 [B]."""
        epoch, step = divmod(position, self.steps_per_epoch)
        return self._permutation(epoch)[step * self.batch_size : (step + 1) * self.batch_size]

    def epochs(self, position: int) -> np.ndarray:
        """Computes the epoch of the batch at `position`, both counted from 0, repeated for each example, int64 [B]."""
        return np.full(self.batch_size, position // self.steps_per_epoch)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """The `Order` of a mixture of sets.

    Each block of `BLOCK` consecutive examples has exactly `counts` examples of each set, at random places. Each set
    goes through its own epochs, with a new shuffle for each: no example repeats before all others of its set have been
    used. The epochs of a small set therefore end earlier than those of a large one.

    Args:
      sizes: the number of examples of each set, the first set first.
      counts: the number of examples of each set in a block; their sum is `BLOCK`.
      batch_size: the number of examples per batch.
      seed: the seed of the shuffles.
    """

    sizes: Sequence[int]
    counts: Sequence[int]
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches, of examples of all sets, in one pass through the first set."""
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
        """Computes block `number`, from 0: the numbers of its examples, and the epoch of each, int64 [2, BLOCK]."""
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

    def example_numbers(self, position: int) -> np.ndarray:
        """Computes the numbers of the examples in the batch at `position`, counted from 0, int64 [B]."""
        return self._batch(position)[0]

    def epochs(self, position: int) -> np.ndarray:
        """Computes the epoch, from 0 and in its own set, of each example of the batch at `position`, int64 [B]."""
        return self._batch(position)[1]


def _permutations(size: int, bits: Callable[[int], np.random.BitGenerator]) -> Callable[[int], np.ndarray]:
    """Builds a function from an epoch to a permutation of range(size), int64 [size]; it caches the last two results.

    `bits` is a function from an epoch to a random bit generator, which makes the permutation reproducible.
    """

    @functools.lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        return np.random.Generator(bits(epoch)).permutation(size)

    return permutation


def order_of(source: Source, batch_size: int, seed: int) -> Order:
    """Builds the order of the training examples of `source`: `Shuffled`, or `Mixed` if it is the first of a mixture.

    Batches in memory and mixtures follow this order. A single streamed set is shuffled by grain instead, and has only
    the epochs and the number of steps per epoch in common with this order (`train_batches`).
    """
    if not source.mix:
        return Shuffled(len(source.train), batch_size, seed)
    return Mixed([len(member.train) for member in source.trained_on], counts_of(_fractions(source)), batch_size, seed)


def epoch_size(source: Source) -> int:
    """Computes the number of training examples in an epoch: the size of a single set.

    In a mixture, it is the number of examples, of all sets together, that are used up in one pass through the first
    set, rounded down.
    """
    return _pass_through_first([len(member.train) for member in source.trained_on], counts_of(_fractions(source)))


def _pass_through_first(sizes: Sequence[int], counts: Sequence[int]) -> int:
    return sizes[0] * BLOCK // counts[0]


def _fractions(source: Source) -> list[float]:
    return [portion.fraction for portion in source.mix]


def counts_of(fractions: Sequence[float]) -> list[int]:
    """Divides `BLOCK` examples among the sets of a mixture, and returns the number of each set, the first set first.

    `fractions` are those of all sets but the first, which gets the rest. Each number is rounded down; the examples left
    over go to the sets with the largest remainders, one each. The sum is `BLOCK`.

    >>> counts_of([0.3, 1 / 3])
    [367, 300, 333]
    """
    exact = [BLOCK * fraction for fraction in (1 - sum(fractions), *fractions)]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in itertools.islice(by_remainder, BLOCK - sum(counts)):
        counts[index] += 1
    return counts
