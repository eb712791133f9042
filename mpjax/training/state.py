"""The state of training as one value, and the model taken apart into flat dicts of arrays by path."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpjax.precision.dtypes import FLOAT32, check_dtypes, widest
from mpjax.precision.loss_scale import loss_scale_state


Arrays = dict[str, jax.Array]
"""Arrays by path, as in `{"blocks/0/conv1/kernel": …}`: cheap to pass to a compiled function, and readable."""

_STREAMS = 2**31


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of state of a model: how its arrays are named and wrapped."""

    names: tuple[str, ...]
    wrapped: Any

    def wrap(self, arrays: Arrays):
        """The NNX state that holds `arrays`."""
        return jax.tree.unflatten(self.wrapped, [arrays[name] for name in self.names])


@dataclasses.dataclass(frozen=True)
class Structure:
    """What remains of a model when its arrays are taken out; put together only while tracing.

    Attributes:
      graph: the model's NNX graph definition.
      params: its trainable parameters (`nnx.Param`).
      stats: everything else it carries from step to step (batch statistics).
      rngs: its random streams, given anew at each step.
    """

    graph: Any
    params: Part
    stats: Part
    rngs: Part
    rng_types: tuple[bool, ...]

    def assemble(self, params: Arrays, stats: Arrays, key: jax.Array | None = None) -> nnx.Module:
        """The model with these arrays; `key` feeds its random streams (dropout)."""
        # Apart from what a loss draws from the same key: split(key)[i] is fold_in(key, i).
        key = jax.random.fold_in(jax.random.key(0) if key is None else key, _STREAMS)
        streams = [
            jax.random.fold_in(key, index) if is_key else jnp.zeros((), jnp.uint32)
            for index, is_key in enumerate(self.rng_types)
        ]
        rngs = jax.tree.unflatten(self.rngs.wrapped, streams)
        return nnx.merge(self.graph, self.params.wrap(params), self.stats.wrap(stats), rngs)

    def stats_of(self, model: nnx.Module) -> Arrays:
        """The model's present statistics, as after a call in training mode."""
        arrays = named(nnx.state(model))
        return {name: arrays[name] for name in self.stats.names}


def uncast(fn: Callable) -> Callable:
    """`fn` itself: the casts are in the model."""
    return fn


def take_apart(model: nnx.Module) -> tuple[Structure, Arrays, Arrays]:
    """Structure, parameters and statistics of `model`, which may be abstract (`nnx.eval_shape`)."""
    graph, params, rngs, stats = nnx.split(model, nnx.Param, nnx.RngState, ...)
    rng_types = tuple(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(rngs))
    structure = Structure(graph, _part(params), _part(stats), _part(rngs), rng_types)
    return structure, named(params), named(stats)


def _part(state) -> Part:
    return Part(tuple(named(state)), jax.tree.structure(state))


def named(state) -> Arrays:
    """The arrays of an NNX state by path."""
    # In the order of the state's leaves, which wrap() relies on.
    return {"/".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


_STEPS = 2**31


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes.

    Random numbers and the order of the data are no state: they are functions of a seed and of `attempts`.

    Attributes:
      step: int32, steps applied; what schedules count. A skipped step does not advance it.
      params: parameters by path, in the policy's `param_dtype`.
      stats: batch statistics by path, float32.
      opt_state: the optimizer's state, the loss scale and the number of skipped steps in it.
      ema: moving average of the parameters by path, float32; empty if not kept.
    """

    step: jax.Array
    params: Arrays
    stats: Arrays
    opt_state: Any
    ema: Arrays

    @property
    def attempts(self) -> jax.Array:
        """int32, steps attempted, applied or skipped: the position in the data. Every step advances it."""
        return self.step + loss_scale_state(self.opt_state).skipped


def step_key(seed: int, state: TrainState) -> jax.Array:
    """The random key of the step that `state` takes next."""
    # Apart from the initial values, which nnx.Rngs draws from fold_in(key(seed), count).
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEPS), state.attempts)


def create_state(params: Arrays, stats: Arrays, tx: optax.GradientTransformation, *, ema: bool = False) -> TrainState:
    """The state before the first step. Pure: run it under `jit`, or `jax.eval_shape` for its shapes.

    Raises:
      DtypeError: batch statistics that are not float32 (float64 for float64 parameters).
    """
    check_dtypes(stats, _at_least_float32(params), name="batch statistics")
    # Copies, not the parameters again: the state is donated, and a buffer can be given away only once.
    averaged = jax.tree.map(lambda p: jnp.array(p, widest(p.dtype, FLOAT32)), params) if ema else {}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        stats=stats,
        opt_state=tx.init(params),
        ema=averaged,
    )


def _at_least_float32(params: Arrays):
    return widest(FLOAT32, *(p.dtype for p in params.values()))
