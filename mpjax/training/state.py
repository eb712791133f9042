"""The training state as a pytree, and a model taken apart into flat dicts of arrays by path."""

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.core import Tracer

from mpjax.errors import UsageError
from mpjax.models.scan import Stacks, names_apart, stack_of, stacks_of
from mpjax.precision.dtypes import FLOAT32, check_dtypes, widest
from mpjax.precision.scale_state import loss_scale_state


Arrays = dict[str, jax.Array]
"""Arrays by path, as in `{"blocks/0/conv1/kernel": …}`: readable, and cheap to pass to a compiled function."""

_STREAMS = 2**31


@dataclasses.dataclass(frozen=True)
class StatePart:
    """The paths and the pytree structure of one kind of model state, such as the parameters, without its arrays.

    Attributes:
      names: the paths of the arrays, in the order of the leaves.
      wrapped: the treedef of the `nnx.State`.
    """

    names: tuple[str, ...]
    wrapped: Any

    def wrap(self, arrays: Arrays):
        """Builds the `nnx.State` that holds the arrays at the paths of `names`; ignores arrays at other paths.

        Raises:
          UsageError: there is no array at one of the paths.
        """
        if missing := [name for name in self.names if name not in arrays]:
            raise UsageError(
                f"the state has no array '{missing[0]}' of the model; write packing.unpack(state) if it is packed"
            )
        return jax.tree.unflatten(self.wrapped, [arrays[name] for name in self.names])


@dataclasses.dataclass(frozen=True)
class Structure:
    """A model without its arrays. The model is assembled only during a trace.

    Attributes:
      graph: the NNX graph definition.
      params: the trainable parameters (`nnx.Param`).
      stats: all other state carried from step to step (batch statistics).
      rngs: the random streams, replaced at each step.
      streams: the leaves of the random streams: keys and counters.
    """

    graph: Any
    params: StatePart
    stats: StatePart
    rngs: StatePart
    streams: tuple["Stream", ...]

    def assemble(self, params: Arrays, stats: Arrays, key: jax.Array | None = None) -> nnx.Module:
        """Builds a new model with these parameters and statistics, by path.

        The keys of its random streams (dropout) are derived from `key`, by default `jax.random.key(0)`; the counters of
        the streams start at 0.
        """
        # The offset keeps these keys distinct from those that a loss splits off: split(key)[i] is fold_in(key, i).
        key = jax.random.fold_in(jax.random.key(0) if key is None else key, _STREAMS)
        rngs = jax.tree.unflatten(self.rngs.wrapped, [stream.start(key) for stream in self.streams])
        return nnx.merge(self.graph, self.params.wrap(params), self.stats.wrap(stats), rngs)

    def stats_of(self, model: nnx.Module) -> Arrays:
        """Reads the current statistics of `model` by path, for example after a call in training mode."""
        arrays = named(nnx.state(model))
        return {name: arrays[name] for name in self.stats.names}

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns `tx` itself, which updates arrays by path."""
        return tx

    @property
    def packed(self) -> Collection[str]:
        """No paths: all arrays have their own."""
        return ()


class Assembly(Protocol):
    """Builds a model from the arrays of a training state: a `Structure`, or a wrapper of one."""

    def assemble(self, params: Arrays, stats: Arrays, key: jax.Array | None = None) -> nnx.Module:
        """Builds the model with these parameters and statistics; see `Structure.assemble`."""
        ...

    def stats_of(self, model: nnx.Module) -> Arrays:
        """Reads the current statistics of `model`, in the form that `assemble` takes."""
        ...

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Makes of an optimizer of arrays by path one of arrays in the form that `assemble` takes."""
        ...

    @property
    def packed(self) -> Collection[str]:
        """The paths of the arrays that are parts of other arrays in the form that `assemble` takes."""
        ...


@dataclasses.dataclass(frozen=True)
class Stream:
    """A leaf of the random streams of a model: a key or a counter.

    Attributes:
      is_key: True for a key, False for a counter.
      index: the number that is folded into its key; for stacked blocks, a tuple with one number for each block.
    """

    is_key: bool
    index: int | tuple[int, ...]

    def start(self, key: jax.Array) -> jax.Array:
        """Computes the value of the leaf at the beginning of a step whose key is `key`.

        A key is `fold_in(key, index)`, a counter is uint32 0. For stacked blocks, the value has a leading axis of
        blocks.
        """
        if isinstance(self.index, int):
            return jax.random.fold_in(key, self.index) if self.is_key else jnp.zeros((), jnp.uint32)
        if not self.is_key:
            return jnp.zeros(len(self.index), jnp.uint32)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array(self.index, jnp.uint32))


def uncast(fn: Callable) -> Callable:
    """Returns `fn` itself: the default argument `cast` of the steps, for a model that casts its own arrays."""
    return fn


def take_apart(model: nnx.Module) -> tuple[Structure, Arrays, Arrays]:
    """Splits `model`, which may be abstract (`nnx.eval_shape`), into structure, parameters and statistics.

    Parameters are the `nnx.Param` variables. Statistics are all other arrays, except the keys and counters of random
    streams, which only the structure describes. Both are dicts by path, as in `blocks/0/conv1/kernel`. They hold the
    arrays of the model, not copies; the model does not change.
    """
    graph, params, rngs, stats = nnx.split(model, nnx.Param, nnx.RngState, ...)
    structure = Structure(graph, _part(params), _part(stats), _part(rngs), _streams(rngs, stacks_of(model)))
    return structure, named(params), named(stats)


def _streams(rngs, stacks: Stacks) -> tuple[Stream, ...]:
    leaves = named(rngs)
    singles = {name: names_apart(name, stacks) for name in leaves}
    order: list[str] = []
    for _, names in itertools.groupby(leaves, lambda name: stack_of(name, stacks)):
        # Block after block, as in single blocks: both forms draw the same random numbers.
        order += itertools.chain(*zip(*(singles[name] for name in names), strict=True))
    index = {name: number for number, name in enumerate(order)}

    def stream(name: str, leaf: jax.Array) -> Stream:
        indices = tuple(index[single] for single in singles[name])
        is_stack = stack_of(name, stacks) is not None
        return Stream(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key), indices if is_stack else indices[0])

    return tuple(stream(name, leaf) for name, leaf in leaves.items())


def _part(state) -> StatePart:
    return StatePart(tuple(named(state)), jax.tree.structure(state))


def named(state) -> Arrays:
    """Maps the path of each leaf of an NNX state, its keys joined by `/`, to its array, in the order of the leaves."""
    # In the order of the state's leaves, on which StatePart.wrap relies.
    return {"/".join(map(str, path)): _array_of(leaf) for path, leaf in nnx.to_flat_state(state)}


def _array_of(leaf: Any) -> jax.Array:
    """The array of a variable, or of an attribute that is a plain array: `self.offsets = jnp.arange(8)`."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All values that a training step changes.

    The state holds no random key and no data position: both are functions of a seed and of `attempts`.

    Attributes:
      step: int32, the number of applied steps, which schedules count. A skipped step does not advance it.
      params: parameters by path, in the policy's `param_dtype`.
      stats: batch statistics by path, float32.
      opt_state: the optimizer's state, including the loss scale and the number of skipped steps.
      ema: moving average of the trained parameters by path, float32; empty if not kept.
    """

    step: jax.Array
    params: Arrays
    stats: Arrays
    opt_state: Any
    ema: Arrays

    @property
    def averaged(self) -> Arrays:
        """The parameters, with their moving average in place of those that have one."""
        return {**self.params, **self.ema}

    @property
    def attempts(self) -> jax.Array:
        """The number of attempted steps, applied or skipped, int32: the position in the data."""
        return self.step + loss_scale_state(self.opt_state).skipped


def create_state(
    params: Arrays,
    stats: Arrays,
    tx: optax.GradientTransformation,
    *,
    ema: bool = False,
    frozen: Collection[str] = (),
) -> TrainState:
    """Creates the state before the first step. The function is pure: it works under `jit` and `jax.eval_shape`.

    With `ema`, the state has a moving average of the parameters that are not `frozen`, which starts at them, in float32
    (or wider). The state holds `params` and `stats` themselves, not copies: a training step, which donates the state,
    deletes them. An array that shares a buffer with another array of the state is copied.

    Raises:
      DtypeError: batch statistics are not float32 (float64 for float64 parameters).
    """
    check_dtypes(stats, _at_least_float32(params), name="batch statistics")
    averaged = {name: jnp.asarray(p, widest(p.dtype, FLOAT32)) for name, p in params.items() if name not in frozen}
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        stats=stats,
        opt_state=tx.init(params),
        ema=averaged if ema else {},
    )
    return without_shared_buffers(state)


def without_shared_buffers(state: TrainState) -> TrainState:
    """Replaces each array that shares a buffer with an earlier array of the state by a copy; other leaves stay.

    A training step donates its state, and a buffer can be donated only once. Shapes and tracers have no buffers, and
    stay unchanged.
    """
    known: set[tuple[int, int]] = set()

    def unshared(leaf: Any) -> Any:
        buffers = _buffers(leaf)
        if known.isdisjoint(buffers):
            known.update(buffers)
            return leaf
        return jnp.copy(leaf)

    return jax.tree.map(unshared, state)


def _buffers(leaf: Any) -> set[tuple[int, int]]:
    """The `(device id, address)` of each shard of an array in this process; none without elements, or for a tracer."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array) or leaf.size == 0:
        return set()
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return {(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards}


def _at_least_float32(params: Arrays):
    return widest(FLOAT32, *(p.dtype for p in params.values()))
