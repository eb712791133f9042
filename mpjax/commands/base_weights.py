"""The frozen weights of a run with adapters: its checkpoints leave out what a file has, and name it by digests."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from flax import nnx

from mpjax.config.schema import Model
from mpjax.errors import UsageError
from mpjax.loop.stored import BASE
from mpjax.models.adapters import adapted_layers
from mpjax.models.pretrained.digests import digests_of
from mpjax.models.scan import names_apart, one_by_one, stacks_of
from mpjax.precision.loss_scale import no_loss_scaling
from mpjax.training.layout import Layout
from mpjax.training.lora import left_out
from mpjax.training.setup import Task, initial_state, pretrained_arrays
from mpjax.training.state import TrainState, take_apart


_WHERE = " with --resume, or as model.pretrained in the run's config.toml"


def described_base(task: Task, model: Model) -> dict[str, Any]:
    """The entry `BASE` of the checkpoints of a run; empty if no file has its weights: then checkpoints hold them.

    Raises:
      UsageError: the file is not there or does not fit, or it lacks weights that are frozen at initial values.
    """
    if not model.weights:
        return {}
    digests = digests_of(_single(task), model.weights, skip=model.pretrained_skip)
    # Of the model before its adapters: parameters that are quantised later are parameters here.
    frozen = {name for name in take_apart(_single(task))[1] if name in task.frozen_apart}
    if random := sorted(frozen - digests.keys()):
        raise UsageError(
            f"{random[0]} is not in {model.weights} and would stay frozen at its random initial value; write "
            f"--training.lora_trained '{random[0].rpartition('/')[0] or random[0]}' to train it"
        )
    return {BASE: {"weights": model.weights, "digests": digests}}


def told_of_adapters(task: Task, model: Model) -> str:
    """Says how many parameters are trained, and what of the frozen ones."""
    _, params, _ = take_apart(task.abstract)
    trained = sum(param.size for name, param in params.items() if name not in task.frozen)
    count = sum(len(names_apart(f"{path}/", stacks_of(task.abstract))) for path in adapted_layers(task.abstract))
    text = f"LoRA: {count} layers have adapters; {trained:,} of {parameters_of(task):,} parameters train"
    if model.weights:
        return f"{text}, and checkpoints leave out the frozen ones, which {model.weights} has"
    return (
        f"{text}. No file has the frozen ones, which keep their initial values: checkpoints hold them; write "
        "--model.pretrained FILE for adapters of trained weights"
    )


def parameters_of(task: Task) -> int:
    """The number of parameters of a model and its adapters, also of those that are stored as codes."""
    arrays = take_apart(nnx.eval_shape(task.make_model, jax.random.key(0)))[1] | take_apart(task.abstract)[1]
    return sum(array.size for array in arrays.values())


def without_base(task: Task, state: TrainState, about: Mapping[str, Any]) -> TrainState:
    """The state that a checkpoint stores: without the arrays that the file named in its description has."""
    if BASE not in about:
        return state
    names = left_out(task.frozen, about[BASE]["digests"], task.abstract)
    params, stats = (
        {name: array for name, array in arrays.items() if name not in names} for arrays in (state.params, state.stats)
    )
    return dataclasses.replace(state, params=params, stats=stats)


def of_file_alone(task: Task, about: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a resumed run's checkpoints: `before`, that of the one that it resumes from, held some arrays.

    These may have been trained, and other settings may freeze them now. They are not those of the file any more, so the
    next checkpoints hold them too.
    """
    held = _rows_in(before.get("checksums", ()), stacks_of(task.abstract))
    digests = {name: digest for name, digest in about[BASE]["digests"].items() if name not in held}
    return {**about, BASE: {**about[BASE], "digests": digests}}


def with_base(
    task: Task, model: Model, saved: Mapping[str, Any], about: Mapping[str, Any], layout: Layout
) -> dict[str, Any]:
    """Adds the arrays that a checkpoint leaves out to its arrays by path, from the file that it names.

    Arrays that were trained stay as they are in the checkpoint, whatever the settings freeze now.

    Raises:
      UsageError: the settings name no file, it cannot be read, or its weights are others.
    """
    expected = about[BASE]
    undone = "the checkpoint holds only what was trained, over frozen weights of"
    if not model.weights:
        raise UsageError(
            f"{undone} {expected['weights']}: name them by --model.pretrained {expected['weights']}{_WHERE}"
        )
    try:
        digests = digests_of(_single(task), model.weights, skip=model.pretrained_skip)
    except UsageError as error:
        raise UsageError(f"{undone} {expected['weights']}, which cannot be read: {error}") from error
    (_, params, stats), stacks = take_apart(task.abstract), stacks_of(task.abstract)
    absent = expected["digests"].keys() - _rows_in(saved, stacks)
    names = left_out([*params, *stats], absent, task.abstract)
    rows = {row for name in names for row in names_apart(name, stacks)}
    wanted = {name: digest for name, digest in expected["digests"].items() if name in rows}
    if other := sorted(name for name, digest in wanted.items() if digests.get(name) != digest):
        raise UsageError(
            f"{undone} {expected['weights']}, and those of {model.weights} are others: {len(other)} of {len(wanted)} "
            f"arrays differ, such as {other[0]}; put the files of before back, or name them by --model.pretrained"
            + _WHERE
        )
    arrays, _ = pretrained_arrays(task, model)
    bare = no_loss_scaling(optax.identity())
    state = initial_state(task, bare, seed=0, ema=False, layout=layout, pretrained=arrays)
    kinds = {"params": state.params, "stats": state.stats}
    base = {f"{kind}/{name}": array for kind, held in kinds.items() for name, array in held.items() if name in names}
    return {**base, **saved}


def _rows_in(paths: Iterable[str], stacks: Mapping[str, int]) -> set[str]:
    """The paths in the model, of single blocks, of the parameters and statistics among the arrays of a checkpoint."""
    kinds = ("params/", "stats/")
    return {row for path in paths if path.startswith(kinds) for row in names_apart(path.partition("/")[2], stacks)}


def _single(task: Task) -> nnx.Module:
    """The abstract model before its adapters, with single blocks."""
    return one_by_one(nnx.eval_shape(task.make_model, jax.random.key(0)))
