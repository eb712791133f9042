"""Packs the small arrays of a training state (biases, scales, statistics) into a few arrays.

A network has hundreds of them. Each alone takes a kernel to check, to update and to restore, which lasts as long as its
launch. Each is also an argument that the host passes to every call.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models.scan import stack_of
from mpjax.precision.dtypes import is_floating
from mpjax.precision.float8.history import is_history
from mpjax.training.state import Arrays, Structure


Group = dict[str, tuple[int, ...]]
"""The shapes of the arrays in a packed array, by path and in order: vectors, packed as [N], or matrices, [1, N]."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of arrays by path, such as parameters, and its packed groups.

    Attributes:
      names: the paths of all arrays.
      groups: the packed arrays by name. The name is in parentheses, which no path of attribute names contains.
    """

    names: frozenset[str]
    groups: Mapping[str, Group]

    @property
    def stored(self) -> frozenset[str]:
        """The names after packing: the paths of the arrays that are not packed, and the names of the packed arrays."""
        packed = {name for group in self.groups.values() for name in group}
        return (self.names - packed) | set(self.groups)

    def pack(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Concatenates the arrays of each group, flattened, to one array: [N], or [1, N] for matrices.

        A group of None becomes None. Arrays outside of groups stay as they are, under their paths.
        """
        rest = dict(arrays)
        packed = {name: _joined([rest.pop(path) for path in group]) for name, group in self.groups.items()}
        return packed | rest

    def unpack(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Splits the packed arrays into the arrays of their groups, in their shapes, and so inverts `pack`."""
        rest = dict(arrays)
        apart: dict[str, Any] = {}
        for name, group in self.groups.items():
            apart |= _parted(rest.pop(name), group)
        return apart | rest


def _joined(values: list[Any]) -> Any:
    # Master weights of float32 parameters are None.
    return None if all(value is None for value in values) else _concatenated(values)


def _parted(array: Any, group: Group) -> dict[str, Any]:
    arrays = [None] * len(group) if array is None else _split(array, tuple(group.values()))
    return dict(zip(group, arrays, strict=True))


@functools.partial(jax.jit, inline=True)
def _concatenated(values: list[jax.Array]) -> jax.Array:
    flat = jnp.concatenate([value.reshape(-1) for value in values])
    # Optimizers choose the parameters that decay by the number of axes.
    return flat if values[0].ndim < 2 else flat[None]


@functools.partial(jax.jit, inline=True, static_argnums=1)
def _split(array: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    # The derivative of a split is a concatenation; the derivative of slices is a sum of padded arrays.
    parts = jax.lax.split(array.reshape(-1), [math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclasses.dataclass(frozen=True)
class Packing:
    """The packed groups of a training state. Without groups, states pass unchanged.

    An elementwise optimizer computes the same on packed arrays. The state of an optimizer that depends on whole arrays,
    on their norms or paths, must not be packed. Stochastic rounding draws its numbers array by array, so packed arrays
    get other draws of the same distribution.

    Attributes:
      params: parameters, and their entries in the optimizer state and the moving average.
      stats: batch statistics.
    """

    params: Kind
    stats: Kind

    @classmethod
    def of(cls, params: Mapping[str, Any], stats: Mapping[str, Any], stacks: Iterable[str] = ()) -> "Packing":
        """Plans groups of vectors, and of small matrices (no kernels), of one floating dtype; packs nothing yet.

        A vector has at most `MOST` elements, a matrix (or an array of more axes) at most `SMALL`, and a whole group at
        most `MOST`. A group has two arrays or more. Histories of float8 scales, and all other arrays, stay unpacked.

        Args:
          params: parameters by path, or their shapes.
          stats: statistics by path, or their shapes.
          stacks: the paths of stacks of blocks, whose matrices stay unpacked.
        """
        return cls(_kind(params, "parameters", tuple(stacks)), _kind(stats, "statistics", tuple(stacks)))

    def pack(self, state: Any) -> Any:
        """Packs each dict in a training state, or in any pytree, whose keys are exactly the planned paths.

        So parameters, statistics, moments and moving averages are packed alike. Arrays that are not packed are not
        copied.
        """
        return _on_mappings(state, {kind.names: kind.pack for kind in self._kinds})

    def unpack(self, state: Any) -> Any:
        """Unpacks each dict that `pack` has packed, in any pytree; arrays that were not packed are not copied."""
        return _on_mappings(state, {kind.stored: kind.unpack for kind in self._kinds})

    @property
    def _kinds(self) -> list[Kind]:
        return [kind for kind in (self.params, self.stats) if kind.groups]


UNPACKED = Packing(Kind(frozenset(), {}), Kind(frozenset(), {}))
"""The packing without groups."""


SMALL = 2**12
"""Elements of the largest packed matrix: a bias of attention, [heads, features], has as many as the width."""

MOST = 2**16
"""Elements of a packed array. XLA reads a part of a larger array by a separate kernel, since it may not stay in the
cache.
"""


def _kind(arrays: Mapping[str, Any], title: str, stacks: Iterable[str] = ()) -> Kind:
    # The title keeps parameters and statistics apart where all of both are packed: a tree is told by its names.
    apart: dict[str, Group] = {}
    for name, array in arrays.items():
        if is_floating(array) and _is_packed(name, tuple(array.shape), stacks):
            axes = "vectors" if len(array.shape) < 2 else "matrices"
            apart.setdefault(f"{title}: {np.dtype(array.dtype).name} {axes}", {})[name] = tuple(array.shape)
    groups = {
        f"({kind})" if number == 1 else f"({kind} {number})": group
        for kind, shapes in apart.items()
        for number, group in enumerate(_groups(shapes), start=1)
    }
    return Kind(frozenset(arrays), {name: group for name, group in groups.items() if len(group) > 1})


def _is_packed(name: str, shape: tuple[int, ...], stacks: Iterable[str]) -> bool:
    if is_history(name):
        return False  # differentiated separately
    if len(shape) < 2:
        return math.prod(shape) <= MOST
    # A product with a packed kernel would copy the kernel. Optimizers treat a stacked matrix as vectors of its blocks.
    return math.prod(shape) <= SMALL and name.split("/")[-1] != "kernel" and stack_of(name, stacks) is None


def _groups(shapes: Group) -> list[Group]:
    groups: list[Group] = [{}]
    size = 0
    for name, shape in shapes.items():
        size += math.prod(shape)
        if size > MOST:
            groups.append({})
            size = math.prod(shape)
        groups[-1][name] = shape
    return groups


def _on_mappings(tree: Any, changes: Mapping[frozenset[str], Any]) -> Any:
    """Replaces each dict in a tree whose set of keys is in `changes` by `changes[keys](dict)`."""

    def is_one(node: Any) -> bool:
        return isinstance(node, dict) and frozenset(node) in changes

    def change(node: Any) -> Any:
        return changes[frozenset(node)](node) if is_one(node) else node

    return jax.tree.map(change, tree, is_leaf=is_one)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A wrapper of a `Structure` that assembles the model from packed arrays, and packs the statistics of a model."""

    structure: Structure
    packing: Packing

    def assemble(self, params: Arrays, stats: Arrays, key: jax.Array | None = None) -> nnx.Module:
        """Builds the model from packed arrays; see `Structure.assemble`."""
        return self.structure.assemble(self.packing.unpack(params), self.packing.unpack(stats), key)

    def stats_of(self, model: nnx.Module) -> Arrays:
        """Reads the current statistics of the model by path, and packs them."""
        return self.packing.pack(self.structure.stats_of(model))
