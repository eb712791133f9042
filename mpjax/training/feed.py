"""How training data reaches the compiled call: a batch, a stack of batches, or the rows of a set that is on the device.

A `Feed` gives for every call what the call is `fed`, and reads the batch of each of its steps from that while tracing.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.data.stream import Batches, BatchesInMemory
from mpjax.training.mesh import place


class Rows(NamedTuple):
    """Some examples of a set that is on the device.

    Attributes:
      table: the whole set by field, [N, ...].
      numbers: int32 [steps, B], the examples of each step.
    """

    table: dict[str, jax.Array]
    numbers: jax.Array


class Feed(Protocol):
    """What compiled calls are given."""

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """For calls of `counts` steps, the first of them step number `position` + 1, what each is fed."""
        ...

    def like(self, fed: Any, count: int) -> Any:
        """The shapes of what a call of `count` steps is fed, given what another call was."""
        ...

    def batch(self, fed: Any, index: Any) -> Any:
        """The batch of step number `index` of a call, from 0."""
        ...


def feed_of(batches: Batches, sharding: NamedSharding, *, most_steps: int, device_bytes: int) -> Feed:
    """The feed for calls of up to `most_steps` steps.

    Args:
      batches: the training data.
      sharding: of a batch.
      most_steps: of a call; with 1 a call is fed its batch as it is.
      device_bytes: sets of up to so many bytes are put on every device as a whole.
    """
    if most_steps == 1:
        return Single(batches, sharding)
    alone = sharding.is_fully_addressable
    if alone and isinstance(batches, BatchesInMemory) and batches.bytes <= device_bytes:
        return Resident.of(batches, sharding)
    return Stacked(batches, sharding)


@dataclasses.dataclass(frozen=True, eq=False)
class Single:
    """Calls of one step are fed its batch."""

    batches: Batches
    sharding: NamedSharding

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Batches on the device."""
        for batch, _ in zip(self.batches.from_position(position), counts, strict=False):
            yield place(batch, self.sharding)

    def like(self, fed: Any, count: int) -> Any:
        """The same: all calls are of one step."""
        return fed

    def batch(self, fed: Any, index: Any) -> Any:
        """The batch itself."""
        return fed


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """Calls are fed their batches, one behind the other: [steps, B, ...]."""

    batches: Batches
    sharding: NamedSharding

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Batches on the device, stacked."""
        stream = self.batches.from_position(position)
        sharding = _behind_steps(self.sharding)
        for count in counts:
            several = list(itertools.islice(stream, count))
            yield place({name: np.stack([batch[name] for batch in several]) for name in several[0]}, sharding)

    def like(self, fed: Any, count: int) -> Any:
        """A stack of another height."""
        return jax.tree.map(lambda x: _of_steps(x, count), fed)

    def batch(self, fed: Any, index: Any) -> Any:
        """One of the stack."""
        return jax.tree.map(lambda x: x[index], fed)


@dataclasses.dataclass(frozen=True, eq=False)
class Resident:
    """The whole set stays on every device; calls are fed the numbers of their examples."""

    batches: BatchesInMemory
    sharding: NamedSharding
    table: dict[str, jax.Array]

    @classmethod
    def of(cls, batches: BatchesInMemory, sharding: NamedSharding) -> "Resident":
        """With the set that `batches` are from."""
        return cls(batches, sharding, place(batches.arrays, NamedSharding(sharding.mesh, PartitionSpec())))

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """The set, and the numbers of the examples of each step."""
        stream = self.batches.rows_from(position)
        sharding = _behind_steps(self.sharding)
        for count in counts:
            numbers = np.stack(list(itertools.islice(stream, count))).astype(np.int32)
            yield Rows(self.table, jax.device_put(numbers, sharding))

    def like(self, fed: Any, count: int) -> Any:
        """The same set, and the numbers for more steps or fewer."""
        return fed._replace(numbers=_of_steps(fed.numbers, count))

    def batch(self, fed: Any, index: Any) -> Any:
        """The examples of a step, gathered."""
        chosen = fed.numbers[index]
        # Numbers of rows that exist: without the mode, a check of each would be compiled in.
        gathered = {name: x.at[chosen].get(mode="promise_in_bounds") for name, x in fed.table.items()}
        return jax.lax.with_sharding_constraint(gathered, self.sharding)


def _behind_steps(sharding: NamedSharding) -> NamedSharding:
    """Of arrays [steps, B, ...], of which a step is divided as by `sharding`."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _of_steps(array: jax.Array, count: int) -> jax.ShapeDtypeStruct:
    """[steps, ...] with another number of steps."""
    return jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype, sharding=array.sharding)
