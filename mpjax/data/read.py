"""Reads stored examples as checked arrays of one shape, for batches in memory and streamed batches."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.example_reader import Reader
from mpjax.data.examples import Examples, Source
from mpjax.data.stacking import Arrays, require_dtypes


_CHUNK = 512


def read_batch(
    examples: Examples,
    indices: Sequence[int] | np.ndarray,
    read: Reader,
    drawn: np.ndarray | None = None,
) -> Arrays:
    """Reads the examples at `indices` as one batch, an array [B, ...] per field, in the order of `indices`.

    `drawn` has the random numbers of their crops; None: numbers from a fixed seed, as in `Reader.batch`.

    Raises:
      UsageError: an example cannot be decoded, or does not match its fields or the dtypes of the first of these
        examples; the message names the example by its index.
    """
    numbers = [int(index) for index in indices]
    # Fetching records one at a time costs fifteen times as much.
    return read.batch(examples.__getitems__(numbers), drawn, numbers)


class Split(Protocol):
    """The examples of a split, read by their numbers, from 0, as checked batches."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    @property
    def first(self) -> Arrays:
        """The first example, as a batch of one, whose dtypes all other batches must have."""
        ...

    def batch(self, indices: Sequence[int] | np.ndarray, drawn: np.ndarray | None = None) -> Arrays:
        """Reads the examples at `indices` as one batch [B, ...], in this order, with the crops `drawn` (`read_batch`).

        Raises:
          UsageError: see `read_batch`; or a dtype differs from the first example of the split.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class SplitOfOne:
    """The `Split` of one data set."""

    examples: Examples
    read: Reader

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def first(self) -> Arrays:
        """The first example, as a batch of one; it is read once and cached."""
        return self._first

    @functools.cached_property
    def _first(self) -> Arrays:
        return read_batch(self.examples, [0], self.read)

    def batch(self, indices: Sequence[int] | np.ndarray, drawn: np.ndarray | None = None) -> Arrays:
        """Reads the examples at `indices` as one batch [B, ...], in this order, with the crops `drawn` (`read_batch`).

        Raises:
          UsageError: see `read_batch`; or a dtype differs from the first example of the split.
        """
        arrays = read_batch(self.examples, indices, self.read, drawn)
        require_dtypes(arrays, self.first, int(indices[0]), self.read.name)
        return arrays


def read_all(split: Split, workers: int) -> Arrays:
    """Reads a whole split into memory with `workers` threads (at least one), each field as one array [N, ...].

    Raises:
      UsageError: see `Split.batch`.
    """
    whole = {name: np.empty((len(split), *value.shape[1:]), value.dtype) for name, value in split.first.items()}

    def fill(start: int) -> None:
        rows = slice(start, min(start + _CHUNK, len(split)))
        for name, value in split.batch(range(rows.start, rows.stop)).items():
            whole[name][rows] = value

    with concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as pool:
        list(pool.map(fill, range(0, len(split), _CHUNK)))
    return whole


def fits_in_memory(source: Source, config: Data, read: Reader) -> bool:
    """True if all training and test examples, decoded, fit into `config.in_memory_mb`, in megabytes of 10**6 bytes.

    The training examples of the sets in `source.mix` count too. Their total size is estimated from the first training
    example, which is read here. False if image sizes vary in any of the sets, because each epoch then crops the images
    anew.
    """
    if any(member.varies for member in source.trained_on):
        return False
    example = sum(value.nbytes for value in read(source.train[0]).values())
    count = sum(len(member.train) for member in source.trained_on) + len(source.test)
    return count * example <= config.in_memory_mb * 1e6
