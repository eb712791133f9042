"""Parameters and statistics that a run does not train: no gradient, no moments, no changed bit."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, cast

import jax.numpy as jnp
import optax
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.scan import names_apart, stacks_of
from mpjax.precision.calls import modules_of, wrap
from mpjax.training.array_patterns import ArrayPaths
from mpjax.training.state import Arrays, take_apart


_FLAG = "--training.freeze"


def frozen_paths(model: nnx.Module, patterns: Iterable[str]) -> frozenset[str]:
    """Collects the paths of the parameters and statistics of `model` that patterns match; empty without patterns.

    Patterns match the paths of single blocks, as in `blocks/3/mlp`. The result has the paths of `model` itself, in
    which stacked blocks are one array.

    Args:
      model: the model, which may be abstract.
      patterns: as for `ArrayPaths.decided`.

    Raises:
      UsageError: a pattern matches nothing, or only some blocks of a stack; or all parameters are frozen.
    """
    patterns = tuple(patterns)
    frozen = covered_paths(model, patterns, _FLAG)
    if patterns and set(take_apart(model)[1]) <= frozen:
        raise UsageError(f"{_FLAG} {' '.join(patterns)}: all parameters are frozen; wanted some to train")
    return frozen


def covered_paths(model: nnx.Module, patterns: Iterable[str], flag: str) -> frozenset[str]:
    """Collects the paths as `frozen_paths`, for the setting `flag`; patterns may cover all parameters.

    Raises:
      UsageError: a pattern matches nothing, or only some blocks of a stack.
    """
    patterns = tuple(patterns)
    if not patterns:
        return frozenset()
    paths = ArrayPaths.of(model)
    single = paths.decided(patterns, [*paths.params, *paths.stats], flag)
    stacks, covered = stacks_of(model), set()
    for path in (name for arrays in take_apart(model)[1:] for name in arrays):
        block_names = names_apart(path, stacks)
        matched = [name for name in block_names if name in single]
        if matched and len(matched) < len(block_names):
            raise UsageError(
                f"{flag} '{single[matched[0]]}' is for some of the {len(block_names)} blocks that {path} holds, and "
                "with scan_blocks they are one array: write --model.no_scan_blocks, or a pattern for all blocks"
            )
        covered |= {path} if matched else set()
    return frozenset(covered)


def freeze_statistics(model: nnx.Module, frozen: Collection[str]) -> None:
    """Makes batch norms whose mean and variance are both in `frozen` normalize by them in training too, in place."""
    for path, module in modules_of(model).items():
        if isinstance(module, nnx.BatchNorm) and {f"{path}/mean", f"{path}/var"} <= set(frozen):
            wrap(module, OnStoredStatistics())


@dataclasses.dataclass(frozen=True)
class OnStoredStatistics:
    """A wrapper that makes a batch norm normalize by its stored statistics."""

    depth: ClassVar[int] = 3

    def __call__(self, call, module, x, use_running_average=None, **kwargs):
        """Calls a batch norm as in evaluation: it reads the stored statistics and does not update them."""
        return call(module, x, use_running_average=True, **kwargs)


def trained_only(tx: optax.GradientTransformation, frozen: Collection[str]) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to update the trained arrays only: frozen ones have no optimizer state.

    Gradients and parameters are dicts by path; their entries at the paths in `frozen` are ignored. A frozen path among
    the gradients gets an update of minus zero, which changes no bit.
    """
    tx = optax.with_extra_args_support(tx)

    def trained(arrays: Any) -> Arrays:
        return {name: array for name, array in arrays.items() if name not in frozen}

    def init(params):
        return tx.init(trained(params))

    def update(updates, state, params=None, **extra):
        new_updates, state = tx.update(trained(updates), state, None if params is None else trained(params), **extra)
        still = {name: jnp.full_like(update, -0.0) for name, update in updates.items() if name in frozen}
        return cast(Arrays, new_updates) | still, state

    return optax.GradientTransformationExtraArgs(init, update)
