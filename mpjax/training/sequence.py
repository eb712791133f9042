"""Divides the values between the layers of a Transformer along the sequence, over the mesh axis `tensor`.

Norms, residual sums and dropout then take a share of the positions on each device, and what the backward pass keeps of
them is a share too. Where all devices of a group would add up the results of a layer that is divided by rows, each adds
up its share of the positions; before a layer that is divided by columns, all positions are gathered: the same bytes
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv:2205.05198, section
4.2.2). The compiler places both; values do not change.

No weight of a layer gets a gradient that is a sum over `tensor`: the compiler would add it in the dtype of the product.
Those of norms and biases are such sums, in float32.

Shapes: B batch, T positions, D width.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.errors import UsageError
from mpjax.mesh_axes import TENSOR
from mpjax.models.remat import Rematerialised, blocks_of
from mpjax.models.scan import stacks_by_block
from mpjax.precision.calls import modules_of, wrap, wrapper_of
from mpjax.precision.module_tree import class_names
from mpjax.precision.rules import is_norm
from mpjax.training.layout import Layout
from mpjax.training.setup import Task
from mpjax.training.state import take_apart
from mpjax.training.tensor import LAYERS


def divide_sequence(model: nnx.Module, layout: Layout) -> None:
    """Makes the blocks that are divided over `tensor` take and return shares of the positions, in place.

    Blocks that follow each other in a list pass shares on; what is before the first and after the last has all
    positions. The model has to be called inside `jax.shard_map`, with `tensor` left to the compiler.
    """
    stacks = stacks_by_block(model)
    blocks = divided_blocks(model, layout.divided)
    for path, block in blocks.items():
        for inside, layer in modules_of(block).items():
            if isinstance(layer, LAYERS):
                wrap(layer, _way(layer, layout.spec(f"{path}/{inside}/kernel" if inside else f"{path}/kernel")))
            elif is_norm(class_names(layer)) and "/" not in inside:
                wrap(layer, ReturnsShares())
        if path in stacks:
            wrap(block, PassesShares())
            wrap(stacks[path], PassesShares(first=True, last=True))
            continue
        if wrapper_of(block, Rematerialised) is None:
            wrap(block, Rematerialised("none"))  # gathered positions are gathered again in the backward pass
        parent, _, number = path.rpartition("/")
        beside = [f"{parent}/{int(number) + step}" for step in (-1, 1)]
        first, last = (other not in blocks for other in beside)
        wrap(block, PassesShares(first=first, last=last))


def divided_blocks(model: nnx.Module, divided: Collection[str]) -> dict[str, nnx.Module]:
    """Finds the blocks of a model with a layer that is divided over `tensor`, by path.

    Args:
      model: the model, which may be abstract.
      divided: the paths of the parameters that are divided over `tensor`.
    """
    return {
        path: block for path, block in blocks_of(model).items() if any(name.startswith(f"{path}/") for name in divided)
    }


def _way(layer: Any, spec: PartitionSpec) -> "TakesAll | GathersPositions | SharesSum":
    """The wrapper of a layer whose kernel has the partition spec `spec`."""
    if TENSOR not in spec:
        return TakesAll()
    outputs = len(layer.out_features) if isinstance(layer.out_features, tuple | list) else 1
    return GathersPositions() if spec.index(TENSOR) >= len(spec) - outputs else SharesSum()


@dataclasses.dataclass(frozen=True)
class PassesShares:
    """A wrapper of a block, or of a stack of blocks, whose first argument and result, [B, T, D], are divided along T.

    Attributes:
      first: whether the argument comes from outside of blocks, where a gradient has all positions.
      last: whether the result leaves the blocks, and so has all positions.
    """

    first: bool = False
    last: bool = False
    depth: ClassVar[int] = -2  # outside of rematerialisation, which keeps the share

    def __call__(self, call, block, *args, **kwargs):
        """Calls the block."""
        args, kwargs = _first_changed(_entered if self.first else _share, args, kwargs)
        y = call(block, *args, **kwargs)
        return _left(y) if self.last else _share(y)


@dataclasses.dataclass(frozen=True)
class ReturnsShares:
    """A wrapper of a block's norm: the layers that take its result gather the same value, once, from shares."""

    depth: ClassVar[int] = 0

    def __call__(self, call, norm, *args, **kwargs):
        """Calls the norm."""
        y = call(norm, *args, **kwargs)
        return _share(y) if y.ndim == 3 else y


@dataclasses.dataclass(frozen=True)
class GathersPositions:
    """A wrapper of a layer that is divided by columns: it takes all positions, and returns its share of the features."""

    depth: ClassVar[int] = 0
    of_product: ClassVar[bool] = True

    def __call__(self, call, layer, *args, **kwargs):
        """Calls the layer."""
        args, kwargs = _first_changed(_gathered, args, kwargs)
        return _constrained(call(layer, *args, **kwargs), None, None, TENSOR)


@dataclasses.dataclass(frozen=True)
class SharesSum:
    """A wrapper of a layer that is divided by rows: each device adds up and returns its share of the positions."""

    depth: ClassVar[int] = 0
    of_product: ClassVar[bool] = True

    def __call__(self, call, layer, *args, **kwargs):
        """Calls the layer."""
        return _shared(call(layer, *args, **kwargs))


@dataclasses.dataclass(frozen=True)
class TakesAll:
    """A wrapper of a layer that is not divided: each device computes all positions, and all of the weight's gradient."""

    depth: ClassVar[int] = 0
    of_product: ClassVar[bool] = True

    def __call__(self, call, layer, *args, **kwargs):
        """Calls the layer; a value without positions is passed as it is."""
        args, kwargs = _first_changed(lambda x: _gathered(x) if x.ndim >= 3 else x, args, kwargs)
        y = call(layer, *args, **kwargs)
        return _shared(y) if y.ndim >= 3 else y


def _first_changed(change: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
    """The arguments of a call with the first of them, which may have been passed by name, changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _constrained(x: jax.Array, *axes: str | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*axes)))


def _whole(x: jax.Array) -> jax.Array:
    return _constrained(x)


def _share(x: jax.Array) -> jax.Array:
    return _constrained(x, None, TENSOR)


def _gather(x: jax.Array) -> jax.Array:
    # Without the first constraint, the compiler would gather x where it is computed, and keep it whole.
    return _whole(_share(x))


def _with_gradient(value: Callable, gradient: Callable) -> Callable:
    """A function that divides a value by `value`, and its gradient by `gradient`.

    The derivative of a constraint is the same constraint, which here would add up all positions on all devices.
    """
    function = jax.custom_vjp(value)
    function.defvjp(lambda x: (value(x), None), lambda _, cotangent: (gradient(cotangent),))
    return function


_gathered = _with_gradient(_whole, _share)
"""All positions of shares; the gradient is a sum over `tensor`, of which each device gets its share."""

_shared = _with_gradient(_share, _gather)
"""Shares of a sum over `tensor`; the gradient of all positions is gathered."""

# The first constraint ends the division there: the compiler would divide embeddings, labels and logits too.
_entered = _with_gradient(lambda x: _share(_whole(x)), _gather)
"""Shares of a value that all devices have; the gradient of all positions is gathered."""

_left = _with_gradient(_gather, _whole)
"""All positions of shares; all devices have the gradient of all positions."""


def require_positions(task: Task, batch: Mapping[str, Any], divided: Collection[str], parts: int) -> None:
    """Checks that the blocks of a model and their divided layers take and return positions that divide.

    Args:
      task: the task.
      batch: the shapes of a prepared batch, to trace the model.
      divided: the paths of the parameters that are divided over `tensor`.
      parts: the size of the mesh's axis `tensor`.

    Raises:
      UsageError: no layer of a block is divided, or one that is divided is a convolution; or a block has another argument
        or result than [B, T, D], or a T that `parts` does not divide.
    """
    name, blocks = type(task.abstract).__name__, divided_blocks(task.abstract, divided)
    if not blocks:
        raise UsageError(
            f"--mesh.sequence divides the values between layers of blocks, and no block of {name} (a module in a list) "
            "has a layer that is divided over tensor: leave it out"
        )
    for path, block in blocks.items():
        for inside, layer in modules_of(block).items():
            if isinstance(layer, nnx.Conv) and f"{path}/{inside}/kernel" in divided:
                raise UsageError(
                    f"--mesh.sequence divides positions, and {path}/{inside} of {name} is a convolution, which reads "
                    "those beside each: leave it out"
                )
    structure, params, stats = take_apart(task.abstract)
    values: list[tuple[str, Any]] = []

    def loss_of(params, stats, key, batch):
        model = structure.assemble(params, stats, key)
        model.train()
        for path, block in divided_blocks(model, divided).items():
            wrap(block, _Measures(path, values))
        return task.objective.loss_of(model, batch, key)[0]

    jax.eval_shape(loss_of, params, stats, jax.eval_shape(jax.random.key, 0), batch)
    length = f"take a multiple of {parts} as --data.length, " if "tokens" in batch else ""
    for path, value in values:
        shape = getattr(value, "shape", None)
        if shape is None or len(shape) != 3:
            what = f"a {type(value).__name__}" if shape is None else f"an array {list(shape)}"
            raise UsageError(
                f"--mesh.sequence divides positions, the second axis of [examples, positions, features], and {path} of "
                f"{name} takes or returns {what}: leave it out"
            )
        if shape[1] % parts:
            raise UsageError(
                f"--mesh.sequence: the {shape[1]} positions in {path} of {name} do not divide among --mesh.tensor "
                f"{parts}: {length}write another --mesh.tensor, or leave it out"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Measures:
    """A wrapper that writes down the shapes of a module's first argument and result, or a result that is no array."""

    path: str
    values: list[tuple[str, Any]]
    depth: ClassVar[int] = -1

    def __call__(self, call, module, *args, **kwargs):
        y = call(module, *args, **kwargs)
        for value in (*args, *kwargs.values())[:1] + (y,):
            seen = jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, jax.Array) else value
            self.values.append((self.path, seen))
        return y
