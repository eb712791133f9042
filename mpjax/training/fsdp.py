"""Gathers parameters that are divided over `fsdp` and `context` where they are used, and scatters their gradients.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023 (arXiv:2304.11277).
"""

import dataclasses
from typing import ClassVar, NoReturn

import jax
from flax import nnx

from mpjax.errors import UsageError
from mpjax.mesh_axes import TENSOR
from mpjax.models.remat import Rematerialised, blocks_of
from mpjax.models.scan import stacks_by_block
from mpjax.precision.calls import wrap, wrapper_of
from mpjax.precision.dtypes import BFLOAT16, widest
from mpjax.precision.float8.recipes import E4M3
from mpjax.precision.float8.scaling import largest_of, quantise_by
from mpjax.precision.reduction import scatter_sum
from mpjax.training.layout import Layout, over
from mpjax.training.state import Arrays


def in_reduce_dtype(layout: Layout, params: Arrays) -> Arrays:
    """Casts parameters that are divided over `fsdp` to `layout.reduce_dtype`, unless they are wider.

    A gradient has the dtype of its parameter, so a sum in float32 needs a parameter in float32. Parameters that are not
    divided, or without an entry in `layout.given`, stay unchanged.
    """
    return {
        name: param.astype(widest(param.dtype, layout.reduce_dtype)) if _widens(layout, name) else param
        for name, param in params.items()
    }


def gathered(layout: Layout, shards: Arrays) -> Arrays:
    """Gathers the parameters that are divided over `fsdp`, inside `jax.shard_map`; other parameters stay unchanged.

    Parameters of `layout.blocks` stay shards: a block gathers them when it is called. A shard is cast to
    `layout.travels` for the transfer, and the whole parameter to `layout.given`. The backward pass sums the gradient
    over `fsdp` in `layout.reduce_dtype`, and each device gets its shard of the sum.

    Args:
      layout: the division of the parameters.
      shards: this device's shard of each parameter, by path; the whole parameter if it is not divided over `fsdp`.
    """
    return {name: shard if _in_block(layout, name) else _gather(layout, name, shard) for name, shard in shards.items()}


def gather_in_blocks(model: nnx.Module, layout: Layout) -> None:
    """Makes the blocks of a model gather their parameters when they are called, in place.

    The backward pass gathers them again, so only one block at a time has its whole parameters in memory. Outside its
    block's call, a parameter that is divided over `fsdp` is a `Divided`, and any use of it raises UsageError. Does
    nothing if the layout has no `blocks`.
    """
    if not layout.blocks:
        return
    blocks, stacked = blocks_of(model), stacks_by_block(model)
    for path in layout.blocks:
        for name, variable in _variables(path, blocks[path]):
            if layout.fsdp_axis(name) is not None:
                variable.set_value(Divided(variable.get_value(), name))
        if path not in stacked and wrapper_of(blocks[path], Rematerialised) is None:
            wrap(blocks[path], Rematerialised("none"))  # the loop over a stack has `jax.checkpoint` of its own
        wrap(blocks[path], Gathers(layout.of_rows(path) if path in stacked else layout, path))


@dataclasses.dataclass(frozen=True)
class Gathers:
    """A wrapper that gathers the parameters of a module for the duration of a call."""

    layout: Layout
    path: str
    depth: ClassVar[int] = 1

    def __call__(self, call, module, *args, **kwargs):
        """Calls a block with whole parameters, and puts the device's shards back after the call, also if it fails."""
        variables = {
            name: variable
            for name, variable in _variables(self.path, module)
            if isinstance(variable.get_value(), Divided)
        }
        divided = {name: variable.get_value() for name, variable in variables.items()}
        for name, variable in variables.items():
            variable.set_value(_gather(self.layout, name, divided[name].array))
        try:
            return call(module, *args, **kwargs)
        finally:
            for name, variable in variables.items():
                variable.set_value(divided[name])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Divided:
    """A device's shard of a parameter, stored in its variable outside calls of its block. Any use raises UsageError.

    A plain array could be taken for the whole: half of an embedding gives logits of half of the vocabulary.
    """

    array: jax.Array
    name: str = dataclasses.field(metadata={"static": True})

    def __getattr__(self, attribute: str):
        # JAX looks for `__jax_array__`; Python's own protocols must find nothing.
        if attribute.startswith("__") and attribute != "__jax_array__":
            raise AttributeError(attribute)
        self._refuse()

    def __getitem__(self, index):
        self._refuse()

    def _refuse(self) -> NoReturn:
        block = self.name.rsplit("/", 1)[0]
        raise UsageError(
            f"{self.name} is divided over fsdp, and gathered only while {block} or the list item around it is called; "
            "it was used outside of that call. Move it out of the list, or write --mesh.fsdp 1"
        )


def _variables(path: str, module: nnx.Module) -> list[tuple[str, nnx.Param]]:
    """Lists the `nnx.Param` variables of `module` with their paths in the model, which begin with `path`."""
    graph = nnx.iter_graph(module)
    return [(f"{path}/{'/'.join(map(str, p))}", variable) for p, variable in graph if isinstance(variable, nnx.Param)]


def _widens(layout: Layout, name: str) -> bool:
    # Without an entry in `given`, a block would not know in which dtype the model stores the parameter.
    return layout.fsdp_axis(name) is not None and name in layout.given


def _in_block(layout: Layout, name: str) -> bool:
    return any(name.startswith(f"{block}/") for block in layout.blocks)


def _gather(layout: Layout, name: str, shard: jax.Array) -> jax.Array:
    """Gathers the parameter at path `name` over `fsdp`, as described in `gathered`; returns `shard` if not divided."""
    axis = layout.fsdp_axis(name)
    if axis is None:
        return shard
    travels, dtype = (dtypes.get(name, shard.dtype) for dtypes in (layout.travels, layout.given))
    axes, over_tensor = layout.gathered_over(name), over((TENSOR,), layout.spec(name))

    def apart(function):
        # Otherwise the compiler would gather over `tensor` too, and divide the result again.
        if TENSOR not in over_tensor:
            return function
        return jax.shard_map(
            function, in_specs=over_tensor, out_specs=over_tensor, axis_names={TENSOR}, check_vma=False
        )

    @apart
    def gather_shards(shard):
        if travels == E4M3:
            others = (TENSOR,) if TENSOR in over_tensor else ()
            return _gather_in_float8(shard, axis, axes, others).astype(dtype)
        return jax.lax.all_gather(shard.astype(travels), axes, axis=axis, tiled=True).astype(dtype)

    @apart
    def scatter(gradient):
        return scatter_sum(gradient, layout.reduce_dtype, axes, axis=axis).astype(shard.dtype)

    @jax.custom_vjp
    def gather(shard):
        return gather_shards(shard)

    def backward(_, gradient):
        return (scatter(gradient),)

    gather.defvjp(lambda shard: (gather(shard), None), backward)
    return gather(shard)


def _gather_in_float8(shard: jax.Array, axis: int, axes: tuple[str, ...], others: tuple[str, ...]) -> jax.Array:
    """Gathers a parameter over `axes` in float8, with the scale of the whole parameter, and casts it to bfloat16.

    `others` are the other axes of the mesh that the parameter is divided over. A layer that quantises the result again
    gets the same numbers, since all scales are powers of two.
    """
    half = shard.astype(BFLOAT16)
    quantised = quantise_by(half, jax.lax.pmax(largest_of(half), (*axes, *others)), E4M3)
    values = jax.lax.all_gather(quantised.values, axes, axis=axis, tiled=True)
    return values.astype(BFLOAT16) * quantised.inverse.astype(BFLOAT16)
