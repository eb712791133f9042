"""Blocks of a model whose values the backward pass computes again, instead of keeping them from the forward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv:1604.06174).
"""

import dataclasses
from typing import ClassVar, Literal

import jax
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision.calls import has_call, wrap
from mpjax.precision.casting.model_arguments import take_models_apart
from mpjax.precision.casting.values import split_arrays


Remat = Literal["none", "dots", "full"]


def products(primitive, *_, **params) -> bool:
    """Whether what an operation gives is kept under "dots": products of matrices, and convolutions.

    Not those with batch dimensions, such as the scores of attention: they are large for what they cost.
    A policy as `jax.checkpoint` takes it (JAX's documentation, "Control autodiff's saved values with jax.checkpoint").
    """
    if primitive.name == "dot_general":
        _, (batch, _) = params["dimension_numbers"]
        return not batch
    return primitive.name == "conv_general_dilated"


_POLICIES = {"dots": products, "full": None}


def blocks_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """The blocks of a model by path: the outermost of its submodules that are items of a list and can be called."""
    found: dict[tuple, nnx.Module] = {}
    for path, module in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        inside = any(path[:depth] in found for depth in range(len(path)))
        if path and isinstance(path[-1], int) and has_call(type(module)) and not inside:
            found[path] = module
    return {"/".join(map(str, path)): module for path, module in found.items()}


def apply_remat(model: nnx.Module, remat: Remat) -> None:
    """Lets each block of `model` keep less for its backward pass, in place; loss and gradients stay as they are.

    It goes around the casts of a policy, whichever is put on first.

    Args:
      model: any NNX module, also an abstract one from `nnx.eval_shape`.
      remat: "none" keeps all that the backward pass reads; "dots" the results of products of matrices and of
        convolutions, and the inputs of each block; "full" these inputs alone.

    Raises:
      UsageError: the model has no blocks.
    """
    if remat == "none":
        return
    blocks = blocks_of(model)
    if not blocks:
        raise UsageError(
            f"--training.remat {remat}: {type(model).__name__} has no blocks, which are modules in a list; hold its "
            "repeated parts in one, as self.blocks = nnx.List([...]), or write --training.remat none"
        )
    for block in blocks.values():
        wrap(block, Rematerialised(remat))


@dataclasses.dataclass(frozen=True)
class Rematerialised:
    """A wrapper that puts calls under `jax.checkpoint`."""

    remat: Remat
    depth: ClassVar[int] = 0

    def __call__(self, call, module, *args, **kwargs):
        """Calls a block, of which the backward pass computes again what `remat` does not keep."""
        # What the block changes in itself (statistics, random streams) has to leave the checkpointed function.
        models = take_models_apart((module, args, kwargs))
        arrays, with_arrays = split_arrays(models.tree)

        def of_arrays(*arrays):
            (block, args, kwargs), changed = models.join(with_arrays(arrays))
            return call(block, *args, **kwargs), changed()

        result, changed = jax.checkpoint(of_arrays, policy=_POLICIES[self.remat])(*arrays)
        models.write_back(changed)
        return result
