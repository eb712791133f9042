"""A Flax model taken apart once: flat dicts of arrays by path for the step, and how to put them together again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


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
