"""Checks whether `--mesh.context` can divide the texts of a run."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from mpjax.config.schema import Config
from mpjax.errors import UsageError
from mpjax.mesh_axes import CONTEXT, LOSS_AXES
from mpjax.models.context import divide_positions
from mpjax.models.transformer import WholeTexts
from mpjax.precision.casting.walk import equations
from mpjax.training.setup import Task


TASKS = ("language_modeling", "instructions")
"""The tasks whose loss is a mean over tokens, each a function of the features of its own position."""

CONTRACT = (
    "let it read positions from `self.context.places(length)`, attend by `self.context.attend(attend)`, and do all "
    "else for each position alone; or leave out --mesh.context"
)
"""What a model has to do that is called with parts of texts, for messages."""


def require_parts_of_texts(config: Config, task: Task, batch: Mapping[str, Any], mesh: Mesh) -> None:
    """Checks that a model can be called with a part of the positions of each text, by a trace of its forward pass.

    Args:
      config: the settings of the run.
      task: the task.
      batch: the shapes of a prepared batch.
      mesh: the mesh, with an axis `context` of more than one device.

    Raises:
      UsageError: the task has no loss of tokens; the objective or a metric is the user's; the positions or the heads do
        not divide; or the model has no attribute `context`, or attends without it.
    """
    parts = mesh.shape[CONTEXT]
    flag = f"--mesh.context {parts}"
    if config.task not in TASKS:
        raise UsageError(f"{flag} divides the positions of texts for --task {' or '.join(TASKS)}, not {config.task}")
    for setting in ("objective", "metrics"):
        if value := getattr(config.training, setting):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UsageError(
                f"{flag} with --training.{setting} {shown}, which takes whole texts: leave one of them out"
            )
    length, name = batch["tokens"].shape[1] - 1, config.model.name
    if length % parts:
        raise UsageError(
            f"{flag} does not divide texts of {length} tokens: write --data.length {length - length % parts or parts}"
        )
    if not isinstance(getattr(task.abstract, "context", None), WholeTexts):
        raise UsageError(
            f"{flag}: --model.name {name} has no `context`, and takes whole texts: give it the attribute `context = "
            f"mpjax.models.WholeTexts()`, {CONTRACT}"
        )
    graph, arrays = nnx.split(task.abstract)

    def features(arrays: Any, tokens: jax.Array) -> Any:
        model = nnx.merge(graph, arrays)
        divide_positions(model, CONTEXT, parts)
        return model(tokens)

    on_each = jax.shard_map(
        features,
        mesh=mesh.abstract_mesh,
        in_specs=(PartitionSpec(), PartitionSpec(None, CONTEXT)),
        out_specs=PartitionSpec(None, CONTEXT),
        axis_names=set(LOSS_AXES),
        check_vma=False,
    )
    tokens = jax.ShapeDtypeStruct((1, length), batch["tokens"].dtype)
    exchanges = {eqn.primitive.name for _, eqn in equations(jax.make_jaxpr(on_each)(arrays, tokens).jaxpr)}
    if "all_to_all" not in exchanges:
        raise UsageError(f"{flag}: --model.name {name} attends to its own part of each text alone: {CONTRACT}")
