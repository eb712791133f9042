"""Gathers parameters that are divided over `fsdp` where they are used, and scatters their gradients.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023 (arXiv:2304.11277).
"""

import dataclasses
from typing import ClassVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from mpjax.precision.calls import wrap, wrapper_of
from mpjax.precision.dtypes import widest
from mpjax.precision.reduction import scatter_sum
from mpjax.training.layout import FSDP, TENSOR, Layout
from mpjax.training.remat import Rematerialised, blocks_of
from mpjax.training.state import Arrays


def widened(layout: Layout, params: Arrays) -> Arrays:
    """Returns parameters, those that are divided no narrower than `reduce_dtype`.

    A gradient has the dtype of its parameter, so that a sum in float32 needs a parameter in float32.
    """
    return {
        name: param.astype(widest(param.dtype, layout.reduce_dtype)) if name in layout.given else param
        for name, param in params.items()
    }


def gathered(layout: Layout, parts: Arrays) -> Arrays:
    """Returns whole parameters, but for those that a block gathers when it is called."""
    return {name: part if _in_block(layout, name) else _gather(layout, name, part) for name, part in parts.items()}


def gather_in_blocks(model: nnx.Module, layout: Layout) -> None:
    """Makes the blocks of a model gather their parameters, in place; the backward pass gathers them again.

    Whole parameters of one block at a time are then in memory, instead of those of the model.
    """
    blocks = blocks_of(model) if layout.blocks else {}
    for path in layout.blocks:
        if wrapper_of(blocks[path], Rematerialised) is None:
            wrap(blocks[path], Rematerialised("none"))
        wrap(blocks[path], Gathers(layout, path))


@dataclasses.dataclass(frozen=True)
class Gathers:
    """A wrapper that gathers the parameters of a module for the time of a call."""

    layout: Layout
    path: str
    depth: ClassVar[int] = 1

    def __call__(self, call, module, *args, **kwargs):
        """Calls a block with whole parameters."""
        variables = {
            f"{self.path}/{'/'.join(map(str, path))}": variable
            for path, variable in nnx.iter_graph(module)
            if isinstance(variable, nnx.Param)
        }
        parts = {name: variable.get_value() for name, variable in variables.items()}
        for name, variable in variables.items():
            variable.set_value(_gather(self.layout, name, parts[name]))
        try:
            return call(module, *args, **kwargs)
        finally:
            for name, variable in variables.items():
                variable.set_value(parts[name])


def _in_block(layout: Layout, name: str) -> bool:
    return any(name.startswith(f"{block}/") for block in layout.blocks)


def _gather(layout: Layout, name: str, part: jax.Array) -> jax.Array:
    axis = layout.fsdp_axis(name)
    if axis is None:
        return part
    travels, given = (dtypes.get(name, part.dtype) for dtypes in (layout.travels, layout.given))
    over_tensor = PartitionSpec(*(over if over == TENSOR else None for over in layout.spec(name)))

    def apart(function):
        # The compiler would gather over `tensor` too, and divide the result again.
        if TENSOR not in over_tensor:
            return function
        return jax.shard_map(
            function, in_specs=over_tensor, out_specs=over_tensor, axis_names={TENSOR}, check_vma=False
        )

    @apart
    def gather_parts(part):
        return jax.lax.all_gather(part.astype(travels), FSDP, axis=axis, tiled=True).astype(given)

    @apart
    def scatter(gradient):
        return scatter_sum(gradient, layout.reduce_dtype, FSDP, axis=axis).astype(part.dtype)

    @jax.custom_vjp
    def gather(part):
        return gather_parts(part)

    def backward(_, gradient):
        return (scatter(gradient),)

    gather.defvjp(lambda part: (gather(part), None), backward)
    return gather(part)
