"""Feeds compiled calls with training data: a batch, a stack of batches, or row numbers of a set on the device.

A `Feed` yields the input of every call, named `fed`, and extracts each step's batch from it while the call is traced.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.data.stream import Batches, BatchesInMemory
from mpjax.training.mesh import place


class Rows(NamedTuple):
    """Selected examples of a set that is on the device.

    Attributes:
      table: the whole set by field, [N, ...].
      numbers: int32 [steps, B], the row numbers of each step's examples.
      given: fields that depend on the epoch too, [steps, B]; the table does not have them.
    """

    table: dict[str, jax.Array]
    numbers: jax.Array
    given: dict[str, jax.Array]


class Feed(Protocol):
    """A source of the inputs of compiled calls."""

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Yields the input of each call; the calls have `counts` steps, the first of which is number `position` + 1."""
        ...

    def abstract(self, fed: Any, count: int) -> Any:
        """Returns the shapes of the input of a call of `count` steps, given the input of another call."""
        ...

    def batch(self, fed: Any, index: Any) -> Any:
        """Returns the batch of step `index` of a call, counted from 0."""
        ...


def feed_of(batches: Batches, sharding: NamedSharding, *, most_steps: int, device_bytes: int) -> Feed:
    """Returns the feed for calls of up to `most_steps` steps.

    Args:
      batches: the training data.
      sharding: the sharding of a batch.
      most_steps: the largest number of steps in a call; with 1 the input of a call is its batch.
      device_bytes: the largest size in bytes of a set that is replicated on every device.
    """
    if most_steps == 1:
        return Single(batches, sharding)
    alone = sharding.is_fully_addressable
    if alone and isinstance(batches, BatchesInMemory) and batches.bytes <= device_bytes:
        return Resident.of(batches, sharding)
    return Stacked(batches, sharding)


@dataclasses.dataclass(frozen=True, eq=False)
class Single:
    """A feed of calls of one step: the input is the batch."""

    batches: Batches
    sharding: NamedSharding

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Yields batches on the device."""
        for batch, _ in zip(self.batches.from_position(position), counts, strict=False):
            yield place(batch, self.sharding)

    def abstract(self, fed: Any, count: int) -> Any:
        """Returns `fed`, since all calls have one step."""
        return fed

    def batch(self, fed: Any, index: Any) -> Any:
        """Returns `fed`, which is the batch."""
        return fed


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """A feed of calls of several steps: the input is their batches, stacked to [steps, B, ...]."""

    batches: Batches
    sharding: NamedSharding

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Yields stacked batches on the device."""
        stream = self.batches.from_position(position)
        sharding = _behind_steps(self.sharding)
        for count in counts:
            several = list(itertools.islice(stream, count))
            yield place(_stacked(several), sharding)

    def abstract(self, fed: Any, count: int) -> Any:
        """Returns the shapes of a stack of `count` batches."""
        return jax.tree.map(lambda x: _of_steps(x, count), fed)

    def batch(self, fed: Any, index: Any) -> Any:
        """Returns one batch of the stack."""
        return jax.tree.map(lambda x: x[index], fed)


@dataclasses.dataclass(frozen=True, eq=False)
class Resident:
    """A feed that replicates the whole set on every device: the input is the row numbers of the examples."""

    batches: BatchesInMemory
    sharding: NamedSharding
    table: dict[str, jax.Array]

    @classmethod
    def of(cls, batches: BatchesInMemory, sharding: NamedSharding) -> "Resident":
        """Creates the feed and copies the set of `batches` to the devices."""
        return cls(batches, sharding, place(batches.arrays, NamedSharding(sharding.mesh, PartitionSpec())))

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Yields the set together with the row numbers of each step."""
        stream = self.batches.rows_from(position)
        sharding = _behind_steps(self.sharding)
        for count in counts:
            chosen, given = zip(*itertools.islice(stream, count), strict=True)
            numbers = np.stack(chosen).astype(np.int32)
            yield Rows(self.table, *jax.device_put((numbers, _stacked(given)), sharding))

    def abstract(self, fed: Any, count: int) -> Any:
        """Returns the same set with the shape of the row numbers for `count` steps."""
        numbers, given = jax.tree.map(lambda x: _of_steps(x, count), (fed.numbers, fed.given))
        return Rows(fed.table, numbers, given)

    def batch(self, fed: Any, index: Any) -> Any:
        """Gathers the examples of a step."""
        chosen = fed.numbers[index]
        # The row numbers are always in bounds; without the mode, a check of each would be compiled in.
        gathered = {name: x.at[chosen].get(mode="promise_in_bounds") for name, x in fed.table.items()}
        given = {name: x[index] for name, x in fed.given.items()}
        return jax.lax.with_sharding_constraint(gathered | given, self.sharding)


def _stacked(several: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the fields of several batches, stacked to [steps, B, ...]."""
    return {name: np.stack([batch[name] for batch in several]) for name in several[0]}


def _behind_steps(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of arrays [steps, B, ...] whose steps are sharded as `sharding` says."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _of_steps(array: jax.Array, count: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of `array`, [steps, ...], with another number of steps."""
    return jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype, sharding=array.sharding)
