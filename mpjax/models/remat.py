"""Rematerialisation: the backward pass recomputes the activations of blocks instead of keeping them.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv:1604.06174).
"""

import dataclasses
from typing import ClassVar, Literal

import jax
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.adapters import ADAPTED
from mpjax.models.scan import run_by, stacks_by_block
from mpjax.precision.calls import has_call, wrap
from mpjax.precision.casting.model_arguments import take_models_apart
from mpjax.precision.casting.values import split_arrays
from mpjax.precision.casting.walk import bodies


Remat = Literal["none", "dots", "full"]


def products(primitive, *_, **params) -> bool:
    """True if "dots" keeps the result of a primitive: matrix products, in float8 too, and convolutions.

    Of a layer with an adapter, the sum of its products is kept in their place.

    Products with batch dimensions, such as attention scores, are recomputed: they are large and cheap to compute. A
    policy for `jax.checkpoint` (JAX's documentation, "Control autodiff's saved values with jax.checkpoint").
    """
    if primitive.name == "dot_general":
        _, (batch, _) = params["dimension_numbers"]
        return not batch
    if primitive.name == "custom_vjp_call":  # a function with its own derivative, such as a product in float8
        inside = (eqn for body in bodies(params["call_jaxpr"]) for eqn in body.eqns)
        return any(products(eqn.primitive, **eqn.params) for eqn in inside)
    return primitive.name == "conv_general_dilated" or (primitive.name == "name" and params["name"] == ADAPTED)


def all_but_gathered(primitive, *_, **params) -> bool:
    """True if "none" keeps the result of a primitive: all but what is gathered from several devices."""
    return not run_by(primitive, params) & {"all_gather", "sharding_constraint"}


_POLICIES = {"none": all_but_gathered, "dots": products, "full": None}


def blocks_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """Finds the blocks of a model by path: the outermost callable modules that are items of a list.

    The stacked block of a `Stack` is one of them, at a path such as `blocks/all`.
    """
    blocks: dict[tuple, nnx.Module] = {}
    stacked = stacks_by_block(model)
    for path, module in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        inside = any(path[:depth] in blocks for depth in range(len(path)))
        repeated = bool(path) and (isinstance(path[-1], int) or "/".join(map(str, path)) in stacked)
        if repeated and has_call(type(module)) and not inside:
            blocks[path] = module
    return {"/".join(map(str, path)): module for path, module in blocks.items()}


def apply_remat(model: nnx.Module, remat: Remat) -> None:
    """Makes each block of `model` (see `blocks_of`) keep fewer activations for its backward pass, in place.

    Loss and gradients do not change. It may be applied before or after a policy: the recomputation includes the casts.

    Args:
      model: any NNX module, also an abstract one from `nnx.eval_shape`.
      remat: "none" keeps all activations that the backward pass reads (in a stack of blocks, those that are costly to
        compute); "dots" keeps the inputs of each block and the results of its matrix products and convolutions; "full"
        keeps only the inputs.

    Raises:
      UsageError: the model has no blocks. A `remat` of "none" changes nothing, and is always valid.
    """
    if remat == "none":
        return
    blocks = blocks_of(model)
    if not blocks:
        raise UsageError(
            f"--training.remat {remat}: {type(model).__name__} has no blocks (modules in a list); put its repeated "
            "parts in a list, as in self.blocks = nnx.List([...]), or write --training.remat none"
        )
    stacks = stacks_by_block(model)
    for path, block in blocks.items():
        if path in stacks:
            stacks[path].keep = _POLICIES[remat]
        else:
            wrap(block, Rematerialised(remat))


@dataclasses.dataclass(frozen=True)
class Rematerialised:
    """A wrapper that runs a module's call under `jax.checkpoint`."""

    remat: Remat
    depth: ClassVar[int] = 0

    def __call__(self, call, module, *args, **kwargs):
        """Calls a block; the backward pass recomputes the values that `remat` does not keep."""
        # The checkpointed function must return the state that the block changes (statistics, random streams).
        models = take_models_apart((module, args, kwargs))
        arrays, with_arrays = split_arrays(models.tree)

        def of_arrays(*arrays):
            (block, args, kwargs), changed = models.join(with_arrays(arrays))
            return call(block, *args, **kwargs), changed()

        result, changed = jax.checkpoint(of_arrays, policy=_POLICIES[self.remat])(*arrays)
        models.write_back(changed)
        return result
