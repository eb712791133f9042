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

from mpjax.mesh_axes import TENSOR
from mpjax.models.remat import Rematerialised, blocks_of
from mpjax.models.scan import stacks_by_block
from mpjax.precision.calls import modules_of, wrap, wrapper_of
from mpjax.precision.module_tree import class_names
from mpjax.precision.rules import is_norm
from mpjax.training.layout import Layout
from mpjax.training.tensor import LAYERS


def divide_sequence(model: nnx.Module, layout: Layout) -> None:
    """Makes the blocks that are divided over `tensor` take and return shares of the positions, in place.

    Blocks that follow each other in a list pass shares on; what is before the first and after the last has all
    positions. The model has to be called inside `jax.shard_map`, with `tensor` left to the compiler.
    """
    stacks = stacks_by_block(model)
    blocks = divided_blocks(model, [name for name, spec in layout.divided.items() if TENSOR in spec])
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

    def __call__(self, call, module, *args, **kwargs):
        """Calls the block."""
        args, kwargs = _first_changed(_entered if self.first else _share, args, kwargs)
        y = call(module, *args, **kwargs)
        return _left(y) if self.last else _share(y)


@dataclasses.dataclass(frozen=True)
class ReturnsShares:
    """A wrapper of a block's norm: the layers that take its result gather the same value, once, from shares."""

    depth: ClassVar[int] = 0

    def __call__(self, call, module, *args, **kwargs):
        """Calls the norm."""
        y = call(module, *args, **kwargs)
        return _share(y) if y.ndim == 3 else y


@dataclasses.dataclass(frozen=True)
class GathersPositions:
    """A wrapper of a layer that is divided by columns: it takes all positions, and returns a share of the features."""

    depth: ClassVar[int] = 0
    of_product: ClassVar[bool] = True

    def __call__(self, call, module, *args, **kwargs):
        """Calls the layer."""
        args, kwargs = _first_changed(_gathered, args, kwargs)
        return _constrained(call(module, *args, **kwargs), None, None, TENSOR)


@dataclasses.dataclass(frozen=True)
class SharesSum:
    """A wrapper of a layer that is divided by rows: each device adds up and returns its share of the positions."""

    depth: ClassVar[int] = 0
    of_product: ClassVar[bool] = True

    def __call__(self, call, module, *args, **kwargs):
        """Calls the layer."""
        return _shared(call(module, *args, **kwargs))


@dataclasses.dataclass(frozen=True)
class TakesAll:
    """A wrapper of a layer that is not divided: each device computes all positions, and the weight's whole gradient."""

    depth: ClassVar[int] = 0
    of_product: ClassVar[bool] = True

    def __call__(self, call, module, *args, **kwargs):
        """Calls the layer; a value without positions is passed as it is."""
        args, kwargs = _first_changed(lambda x: _gathered(x) if x.ndim >= 3 else x, args, kwargs)
        y = call(module, *args, **kwargs)
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
