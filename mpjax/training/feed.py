"""Compiled calls of one step or several, and their training data: a batch, a stack of batches, or example numbers.

A `Feed` yields the input of every call, named `fed`, from the steps per call (`counts`) and the number of steps before
the first call (`position`). Inside the traced call it extracts the batch of each step; example numbers index a set that
is on the device. Several steps run without the host in between.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.data.stream import Batches, BatchesInMemory, Share
from mpjax.errors import UsageError
from mpjax.training.escaped import trace
from mpjax.training.mesh import put_on_devices


def own_rows(sharding: NamedSharding, size: int) -> Share:
    """Finds the examples of a global batch of `size` that this process reads: those that its devices hold.

    Processes that divide a model over `tensor` between them read the same examples.

    Returns:
      The index of this process's block of consecutive examples, from 0, and the number of such blocks in the batch.

    Raises:
      UsageError: its devices do not hold one contiguous block of examples, or the batch is not cut into equal blocks.
    """
    indices = sharding.addressable_devices_indices_map((size,)).values()
    held = {index[0].indices(size)[:2] for index in indices if index}
    first, last = min(start for start, _ in held), max(stop for _, stop in held)
    count = size // (last - first)
    if sum(stop - start for start, stop in held) != last - first or first % (last - first) or size % (last - first):
        raise UsageError(
            f"the devices of this process hold rows {sorted(held)} of a batch of {size}, not one block of it: write "
            "--mesh.data and --mesh.fsdp as multiples of the number of processes"
        )
    return Share(first // (last - first), count)


class SelectedRows(NamedTuple):
    """Selected examples of a set that is on the device.

    Attributes:
      table: the whole set by field, [N, ...].
      numbers: int32 [steps, B], the indices into the table of each step's examples.
      epoch_fields: fields that also depend on the epoch, [steps, B]; they are not in the table.
    """

    table: dict[str, jax.Array]
    numbers: jax.Array
    epoch_fields: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Single:
    """A feed of calls of one step: the input is the batch."""

    batches: Batches
    sharding: NamedSharding

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Yields the batch of each call, on the devices, from the one after `position` steps on.

        There is one batch for each item of `counts`, whose value is not read.
        """
        # Behind the last call, no batch is read.
        for _, batch in zip(counts, self.batches.from_position(position), strict=False):
            yield put_on_devices(batch, self.sharding)

    def abstract(self, fed: Any, count: int) -> Any:
        """Returns `fed` itself: the inputs of all calls, of one step each, have the same shapes."""
        return fed

    def batch(self, fed: Any, index: Any) -> Any:
        """Returns `fed` itself, which is the batch; `index` is not read."""
        return fed


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """A feed of calls of several steps: the input is their batches, stacked to [steps, B, ...]."""

    batches: Batches
    sharding: NamedSharding

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Yields the batches of each call, stacked to [count, B, ...], on the devices, from step `position` on."""
        stream = self.batches.from_position(position)
        sharding = _behind_steps(self.sharding)
        for count in counts:
            several = list(itertools.islice(stream, count))
            yield put_on_devices(_stacked(several), sharding)

    def abstract(self, fed: Any, count: int) -> Any:
        """The shapes, dtypes and shardings of the input of a call of `count` steps, from `fed` for any other number."""
        return jax.tree.map(lambda x: _of_steps(x, count), fed)

    def batch(self, fed: Any, index: Any) -> Any:
        """Slices the batch of step `index` of the call, counted from 0, from the stack."""
        return jax.tree.map(lambda x: x[index], fed)


@dataclasses.dataclass(frozen=True, eq=False)
class Resident:
    """A feed that replicates the whole set on every device: the input is the set and the indices of the examples."""

    batches: BatchesInMemory
    sharding: NamedSharding
    table: dict[str, jax.Array]

    @classmethod
    def of(cls, batches: BatchesInMemory, sharding: NamedSharding) -> "Resident":
        """Creates a feed of batches with this `sharding`, and copies the whole set to every device of its mesh."""
        return cls(batches, sharding, put_on_devices(batches.arrays, NamedSharding(sharding.mesh, PartitionSpec())))

    def calls(self, position: int, counts: Iterable[int]) -> Iterator[Any]:
        """Yields the input of each call: the set, and the indices of the examples of its steps, from `position` on."""
        stream = self.batches.rows_from(position)
        sharding = _behind_steps(self.sharding)
        for count in counts:
            chosen, fields = zip(*itertools.islice(stream, count), strict=True)
            numbers = np.stack(chosen).astype(np.int32)
            yield SelectedRows(self.table, *jax.device_put((numbers, _stacked(fields)), sharding))

    def abstract(self, fed: Any, count: int) -> Any:
        """The input of a call of `count` steps: the same set, and shapes in place of indices and other fields."""
        numbers, fields = jax.tree.map(lambda x: _of_steps(x, count), (fed.numbers, fed.epoch_fields))
        return SelectedRows(fed.table, numbers, fields)

    def batch(self, fed: Any, index: Any) -> Any:
        """Gathers the batch of step `index` of the call, counted from 0, from the set on the device."""
        chosen = fed.numbers[index]
        # The indices are always in bounds. The mode omits the check of each.
        gathered = {name: x.at[chosen].get(mode="promise_in_bounds") for name, x in fed.table.items()}
        fields = {name: x[index] for name, x in fed.epoch_fields.items()}
        return jax.lax.with_sharding_constraint(gathered | fields, self.sharding)


Feed = Single | Stacked | Resident
"""A source of the inputs of compiled calls: the classes have the same methods."""


def feed_of(batches: Batches, sharding: NamedSharding, *, most_steps: int, device_bytes: int) -> Feed:
    """Creates the feed for calls of up to `most_steps` steps: `Single` if that is 1, else `Resident` or `Stacked`.

    It is `Resident` in a run of one process whose set is in memory and has at most `device_bytes`; the set is then
    copied to every device at once.

    Args:
      batches: the training data.
      sharding: the sharding of a batch.
      most_steps: the largest number of steps in a call; with 1 the input of a call is its batch.
      device_bytes: the largest size, in bytes on each device, of a set that is replicated on every device.
    """
    if most_steps == 1:
        return Single(batches, sharding)
    alone = sharding.is_fully_addressable
    if alone and isinstance(batches, BatchesInMemory) and batches.bytes <= device_bytes:
        return Resident.of(batches, sharding)
    return Stacked(batches, sharding)


def _stacked(several: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stacks the fields of several batches to [steps, B, ...]."""
    return {name: np.stack([batch[name] for batch in several]) for name in several[0]}


def _behind_steps(sharding: NamedSharding) -> NamedSharding:
    """The sharding of arrays [steps, B, ...] whose batches are sharded by `sharding`."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _of_steps(array: jax.Array, count: int) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of `array`, [steps, ...], with `count` steps."""
    return jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype, sharding=array.sharding)


def make_train_call(train_step: Callable, batch_of: Callable[[Any, Any], Any]) -> jax.stages.Wrapped:
    """Builds the jit-compiled call `(state, fed, count) -> (state, metrics)` of `count` steps; it donates the state.

    Args:
      train_step: `(state, batch) -> (state, metrics)`.
      batch_of: `(fed, index) -> batch`, the batch of step `index` of the call, counted from 0.

    Returns:
      A jitted function whose metrics have a leading axis [count], or no such axis if the count is 1. The count is
        static: each count compiles its own program.
    """

    @jax.jit(donate_argnums=0, static_argnums=2)
    def train_call(state, fed, count: int):
        if count == 1:
            return train_step(state, batch_of(fed, 0))
        # The count is static, so the device runs all steps without the host.
        return jax.lax.scan(lambda state, index: train_step(state, batch_of(fed, index)), state, jnp.arange(count))

    return train_call


class CallProgram(NamedTuple):
    """The program of a call at all stages of compilation.

    Attributes:
      jaxpr: the traced program.
      lowered: the input of XLA.
      compiled: the output of XLA.
    """

    jaxpr: Any
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled


def compile_calls(
    call: jax.stages.Wrapped,
    state: Any,
    feeds: Mapping[int, Any],
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    see: Callable[[int, CallProgram], None] = lambda count, program: None,
) -> Callable:
    """Compiles `call` ahead of time, one program for each count in `feeds`.

    Returns `(state, fed, count) -> result`, which runs the program of this count, and raises KeyError for any other.

    Args:
      call: a jitted function `(state, fed, count)`.
      state: the state, or its shapes, dtypes and shardings.
      feeds: the input `fed` by count (the number of steps in a call), or its shapes, dtypes and shardings.
      options: XLA options.
      see: called with each count and its program, right after it is compiled.

    Raises:
      UsageError: the call computes with an array of an earlier trace.
    """
    programs = {}
    for count, fed in feeds.items():
        traced = trace(call, state, fed, count)
        lowered = traced.lower()
        programs[count] = lowered.compile(compiler_options=dict(options))
        see(count, CallProgram(traced.jaxpr, lowered, programs[count]))
    return lambda state, fed, count: programs[count](state, fed)
