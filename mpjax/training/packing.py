"""Packs the small arrays of a training state (biases, scales, statistics) into a few arrays.

A network has hundreds of them. Each alone takes a kernel to check, to update and to restore, which lasts as long as its
launch. Each is also an argument that the host passes to every call.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.scan import stack_of
from mpjax.precision.dtypes import is_floating
from mpjax.precision.float8.history import is_history
from mpjax.training.kernels import BY_AXES, Kernels
from mpjax.training.state import Arrays, Structure


@dataclasses.dataclass(frozen=True)
class PackedGroup:
    """The arrays in a packed array.

    Attributes:
      shapes: their shapes, by path and in order.
      decays: whether weight decay applies to them. They are then packed as [1, N], else as [N]: an optimizer tells
        packed kernels by their number of axes.
    """

    shapes: Mapping[str, tuple[int, ...]]
    decays: bool

    def holds(self, values: list[Any]) -> bool:
        """True if the values are arrays of the planned shapes and of one dtype, or all None."""
        if all(value is None for value in values):
            return True
        shapes = [getattr(value, "shape", None) for value in values]
        return shapes == list(self.shapes.values()) and len({value.dtype for value in values}) == 1

    def join(self, values: list[Any]) -> Any:
        """Concatenates the arrays of the group; None if they are None, as master weights of float32 parameters are."""
        return None if all(value is None for value in values) else _concatenated(values, self.decays)

    def split(self, array: Any) -> dict[str, Any]:
        """Inverts `join`: splits a packed array into arrays by path."""
        arrays = [None] * len(self.shapes) if array is None else _split(array, tuple(self.shapes.values()))
        return dict(zip(self.shapes, arrays, strict=True))


@functools.partial(jax.jit, inline=True, static_argnums=1)
def _concatenated(values: list[jax.Array], decays: bool) -> jax.Array:
    flat = jnp.concatenate([value.reshape(-1) for value in values])
    return flat[None] if decays else flat


@functools.partial(jax.jit, inline=True, static_argnums=1)
def _split(array: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    # The derivative of a split is a concatenation; the derivative of slices is a sum of padded arrays.
    pieces = jax.lax.split(array.reshape(-1), [math.prod(shape) for shape in shapes])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of arrays by path, such as parameters, and its packed groups.

    Attributes:
      names: the paths of all arrays.
      groups: the packed arrays by name. The name is in parentheses, which no path of attribute names contains.
    """

    names: frozenset[str]
    groups: Mapping[str, PackedGroup]

    @property
    def stored(self) -> frozenset[str]:
        """The names after packing: the paths of the arrays that are not packed, and the names of the packed arrays."""
        packed = {name for group in self.groups.values() for name in group.shapes}
        return (self.names - packed) | set(self.groups)

    def has_packed(self, arrays: Mapping[str, Any]) -> bool:
        """True if the arrays have the names and the sizes of those that `pack` returns."""
        return self.stored == set(arrays) and all(
            arrays[name].size == sum(map(math.prod, group.shapes.values())) for name, group in self.groups.items()
        )

    def pack(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Concatenates the arrays of each group, flattened, to one array.

        Arrays outside of groups stay as they are, under their paths. If the arrays of a group have other shapes than
        planned or several dtypes, all arrays stay.
        """
        if not all(group.holds([arrays[path] for path in group.shapes]) for group in self.groups.values()):
            return dict(arrays)
        rest = dict(arrays)
        packed = {name: group.join([rest.pop(path) for path in group.shapes]) for name, group in self.groups.items()}
        return packed | rest

    def unpack(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Splits the packed arrays into the arrays of their groups, in their shapes, and so inverts `pack`."""
        rest = dict(arrays)
        apart: dict[str, Any] = {}
        for name, group in self.groups.items():
            apart |= group.split(rest.pop(name))
        return apart | rest


@dataclasses.dataclass(frozen=True)
class Packing:
    """The packed groups of a training state. Without groups, states pass unchanged.

    Stochastic rounding draws its numbers array by array. If it rounds packed arrays, they get other draws of the same
    distribution.

    Attributes:
      params: parameters, and their entries in the optimizer state and the moving average.
      stats: batch statistics.
    """

    params: Kind
    stats: Kind

    @classmethod
    def of(cls, params: Mapping[str, Any], stats: Mapping[str, Any], kernels: Kernels = BY_AXES) -> "Packing":
        """Plans groups of small arrays of one floating dtype, decayed ones apart from others; packs nothing yet.

        A vector has at most `MOST` elements, an array of more axes at most `SMALL`, and a whole group at most `MOST`. A
        group has two arrays or more. Arrays named `kernel`, arrays of more axes in stacks, and histories of float8
        scales stay unpacked.

        Args:
          params: parameters by path, or their shapes.
          stats: statistics by path, or their shapes.
          kernels: tells which parameters decay.
        """
        return cls(_kind(params, "parameters", kernels), _kind(stats, "statistics", kernels))

    def pack(self, state: Any) -> Any:
        """Packs each dict in a training state, or in any pytree, that has the planned paths and shapes.

        So parameters, statistics, moments and moving averages are packed alike. Dicts of arrays of other shapes, such
        as the factors of Adafactor's moments, stay. Arrays that are not packed are not copied.
        """
        return _on_mappings(state, {kind.names: kind.pack for kind in self._kinds})

    def unpack(self, state: Any) -> Any:
        """Unpacks each dict that `pack` has packed, in any pytree; arrays that were not packed are not copied."""
        return _on_mappings(state, {kind.stored: kind.unpack for kind in self._kinds})

    def require_packed(self, params: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
        """Raises UsageError unless parameters and statistics are those of a state that this packing has packed."""
        for title, kind, arrays in (("params", self.params, params), ("stats", self.stats, stats)):
            if kind.groups and not kind.has_packed(arrays):
                packed = any(name.startswith("(") for name in arrays)
                raise UsageError(
                    f"the {title} of the state are {'packed by another Packing' if packed else 'not packed'}: wanted "
                    "those of packing.pack(state), with the packing of the step"
                )

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


def _kind(arrays: Mapping[str, Any], title: str, kernels: Kernels) -> Kind:
    # The title keeps parameters and statistics apart where all of both are packed: a tree is told by its names.
    apart: dict[tuple[str, bool], dict[str, tuple[int, ...]]] = {}
    for name, decays in kernels.mask(dict(arrays)).items():
        array = arrays[name]
        if is_floating(array) and _is_packed(name, tuple(array.shape), kernels.stacks):
            kind = f"{title}: {np.dtype(array.dtype).name} {'matrices' if decays else 'vectors'}"
            apart.setdefault((kind, decays), {})[name] = tuple(array.shape)
    groups = {
        f"({kind})" if number == 1 else f"({kind} {number})": PackedGroup(shapes, decays)
        for (kind, decays), every in apart.items()
        for number, shapes in enumerate(_parts(every), start=1)
    }
    return Kind(frozenset(arrays), {name: group for name, group in groups.items() if len(group.shapes) > 1})


def _is_packed(name: str, shape: tuple[int, ...], stacks: Iterable[str]) -> bool:
    if is_history(name):
        return False  # differentiated separately
    if len(shape) < 2:
        return math.prod(shape) <= MOST
    # A product with a packed kernel would copy the kernel. Optimizers treat a stacked matrix as vectors of its blocks.
    return math.prod(shape) <= SMALL and name.split("/")[-1] != "kernel" and stack_of(name, stacks) is None


def _parts(shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Splits a group, in order, where it would have more than `MOST` elements."""
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        size += math.prod(shape)
        if size > MOST:
            parts.append({})
            size = math.prod(shape)
        parts[-1][name] = shape
    return parts


def _on_mappings(tree: Any, changes: Mapping[frozenset[str], Any]) -> Any:
    """Replaces each dict in a tree whose set of keys is in `changes` by `changes[keys](dict)`."""

    def is_one(node: Any) -> bool:
        return isinstance(node, dict) and frozenset(node) in changes

    def change(node: Any) -> Any:
        return changes[frozenset(node)](node) if is_one(node) else node

    return jax.tree.map(change, tree, is_leaf=is_one)


def by_path(tx: optax.GradientTransformation, packing: Packing) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to update packed arrays: it gets all arrays by path, and its updates and its state are packed.

    So any optimizer computes what it computes without packing. XLA fuses the parts again.
    """
    rule = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return packing.pack(rule.init(packing.unpack(params)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state, params = packing.unpack((updates, state, params))
        return packing.pack(rule.update(updates, state, params, **extra))

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A wrapper of a `Structure` whose states are packed. The optimizer sees arrays by path.

    `make_train_step(Packed(structure, packing), tx, ...)` is the step of `structure` for any `tx`. It takes
    `packing.pack(state)`, and `packing.unpack` turns its states back. In such a step, no array is frozen and no packed
    one divided.
    """

    structure: Structure
    packing: Packing

    def assemble(self, params: Arrays, stats: Arrays, key: jax.Array | None = None) -> nnx.Module:
        """Builds the model from packed arrays; see `Structure.assemble`.

        Raises:
          UsageError: the arrays are not packed, or by another packing.
        """
        self.packing.require_packed(params, stats)
        return self.structure.assemble(self.packing.unpack(params), self.packing.unpack(stats), key)

    def stats_of(self, model: nnx.Module) -> Arrays:
        """Reads the current statistics of the model by path, and packs them."""
        return self.packing.pack(self.structure.stats_of(model))

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Wraps the optimizer to update packed arrays."""
        return by_path(tx, self.packing)

    @property
    def packed(self) -> Collection[str]:
        """The paths of the packed arrays."""
        groups = [*self.packing.params.groups.values(), *self.packing.stats.groups.values()]
        return [name for group in groups for name in group.shapes]


class PackedElementwise(Packed):
    """A `Packed` structure for elementwise optimizers, such as SGD, Adam and Lion, which see the packed arrays.

    It saves up to 4 % of the kernels of a step (ResNet-50 in float16). An optimizer that depends on whole arrays, on
    their norms or paths, would compute other updates.
    """

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns `tx` itself."""
        return tx
