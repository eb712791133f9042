"""Learning rates of parts of a model: factors on the updates by path, and layer-wise decay.

Layer-wise decay: Clark et al., "ELECTRA", 2020 (arXiv:2003.10555); Bao et al., "BEiT: BERT Pre-Training of Image
Transformers", 2021 (arXiv:2106.08254).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import optax

from mpjax.config import schema
from mpjax.errors import UsageError
from mpjax.models.remat import blocks_of
from mpjax.models.scan import Stacks, names_apart, one_by_one
from mpjax.precision.calls import wrap
from mpjax.precision.dtypes import path_name
from mpjax.training.array_patterns import ArrayPaths
from mpjax.training.setup import Task
from mpjax.training.state import take_apart


def factors_of(config: schema.Optimizer, task: Task, batch: Mapping[str, Any]) -> dict[str, float]:
    """Computes the learning-rate factor of each trained parameter, by path; factors of 1 are left out.

    The factor is that of the first pattern of `config.rates` that matches the parameter (1 if none does), times
    `config.layer_decay` to the power of its depth (see `depths_of`). Stacked blocks have the paths of single blocks.

    Args:
      config: the `optimizer` section.
      task: the task to train.
      batch: the shapes of a prepared batch, to trace the model and find the parameters used before its blocks.

    Raises:
      UsageError: a pattern decides no parameter, or only frozen ones; or, with layer decay, the model has no blocks, or
        several lists of them.
    """
    paths = ArrayPaths.of(task.abstract)
    frozen = task.frozen_apart
    trained = [path for path in paths.params if path not in frozen]
    for pattern in config.rates:
        held = [path for path in paths.params if paths.covers(pattern, path)]
        if held and not set(held) & set(trained):
            raise UsageError(
                f"--optimizer.rates {pattern}: all that it matches is frozen by --training.freeze, such as {held[0]}; "
                "leave one of them out"
            )
    decided = paths.decided(config.rates, trained, "--optimizer.rates")
    factors = {path: config.rates[pattern] for path, pattern in decided.items()}
    if config.layer_decay != 1:
        for path, depth in depths_of(task, batch).items():
            factors[path] = factors.get(path, 1.0) * config.layer_decay**depth
    return {path: factor for path, factor in factors.items() if factor != 1 and path in trained}


def scale_by_path(factors: Mapping[str, float], stacks: Stacks) -> optax.GradientTransformation:
    """Builds a stateless rule that multiplies each update by the factor of its path.

    Args:
      factors: factors by path, with the paths of single blocks; 1 for any other path.
      stacks: the stacks of blocks; each block of a stacked update is multiplied by its own factor.
    """

    def scaled(path: tuple, update: jax.Array) -> jax.Array:
        block_factors = [factors.get(name, 1.0) for name in names_apart(path_name(path), stacks)]
        if len(set(block_factors)) == 1:
            return update if block_factors[0] == 1 else update * block_factors[0]
        return update * np.array(block_factors, update.dtype).reshape(-1, *(1,) * (update.ndim - 1))

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))


def depths_of(task: Task, batch: Mapping[str, Any]) -> dict[str, int]:
    """Counts the depth of each parameter below the output of the model, by path, with the paths of single blocks.

    The last block has depth 1, the block before it 2, and so on. Parameters that the model uses before it calls its
    first block are one deeper than that block. All other parameters have depth 0.

    Args:
      task: the task, whose model has one list (or stack) of blocks.
      batch: the shapes of a prepared batch, to trace the model.

    Raises:
      UsageError: the model has no blocks, or they are in several lists, or it does not call the first.
    """
    flag = "--optimizer.layer_decay"
    model = one_by_one(task.abstract)
    blocks = [path for path in blocks_of(model) if path.rpartition("/")[2].isdecimal()]
    lists = {path.rpartition("/")[0] for path in blocks}
    if len(lists) != 1:
        fault = f"blocks in several lists ({', '.join(sorted(lists))})" if lists else "no blocks (modules in a list)"
        raise UsageError(f"{flag}: the model has {fault}, and layers are counted along one; write --optimizer.rates")
    parent = lists.pop()
    count = len(blocks)
    below = _used_before(task, f"{parent}/0", batch)
    depths = {}
    for path in ArrayPaths.of(task.abstract).params:
        number = path.removeprefix(f"{parent}/").split("/")[0] if path.startswith(f"{parent}/") else ""
        depths[path] = count - int(number) if number.isdecimal() else count + 1 if path in below else 0
    return depths


class _Reached(Exception):
    """Raised in place of a call of the first block, to end the trace; carries the arguments of the call."""


@dataclasses.dataclass(frozen=True)
class _Stops:
    """A wrapper that raises `_Reached` in place of a call of its module, to end the trace of a model there."""

    depth: ClassVar[int] = -1

    def __call__(self, call, module, *args, **kwargs):
        raise _Reached(args, kwargs)


def _used_before(task: Task, block: str, batch: Mapping[str, Any]) -> frozenset[str]:
    """Finds the paths of the parameters that a model uses before it calls the block at path `block`, by a trace.

    Raises UsageError if the model does not call it.
    """
    structure, params, stats = take_apart(one_by_one(task.abstract))

    def arguments_of_block(params, stats, key, batch):
        model = structure.assemble(params, stats, key)
        model.train()
        wrap(blocks_of(model)[block], _Stops())
        try:
            task.objective.loss_of(model, batch, key)
        except _Reached as reached:
            return [leaf for leaf in jax.tree.leaves(reached.args) if isinstance(leaf, jax.Array)]
        raise UsageError(f"--optimizer.layer_decay: the model does not call {block}; write --optimizer.rates")

    # The trace ends at the block, so it contains only uses before it.
    jaxpr = jax.make_jaxpr(arguments_of_block)(params, stats, jax.eval_shape(jax.random.key, 0), batch).jaxpr
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    return frozenset(name for name, var in zip(sorted(params), jaxpr.invars, strict=False) if id(var) in used)
