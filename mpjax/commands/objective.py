"""Chooses the objective of a run: its task's or the user's own, with the user's metrics."""

import functools
from typing import Any

import jax
from flax import nnx

from mpjax.config import Config
from mpjax.config.user_code import load_function
from mpjax.data import Fields, batch_shapes
from mpjax.errors import UsageError
from mpjax.precision.policy import Policy
from mpjax.training.metrics import with_metrics
from mpjax.training.objective import Objective, Prepare
from mpjax.training.objectives import objective_of
from mpjax.training.setup import Task
from mpjax.training.user_objective import OUTPUTS, own_objective
from mpjax.training.views import predict_with


def choose_objective(
    config: Config, prepare: Prepare, policy: Policy, abstract: nnx.Module, fields: Fields
) -> Objective:
    """Builds the objective that `config` names.

    Args:
      config: the settings of the run.
      prepare: `(batch, key) -> batch`, which augments unless the key is None.
      policy: the policy of the run.
      abstract: the model with shapes in place of arrays.
      fields: the fields of a batch.

    Raises:
      UsageError: the code that a setting names cannot be used, or the model cannot compute its logits in parts.
    """
    chunk = config.training.chunked_loss
    if chunk and not all(callable(getattr(abstract, name, None)) for name in ("features", "logits")):
        raise UsageError(
            f"--training.chunked_loss {chunk}: {config.model.name} has no methods `features` and `logits` to compute "
            "the logits of some tokens at a time with; write --training.chunked_loss 0"
        )
    if named := config.training.objective:
        function = load_function(named, flag="--training.objective")
        objective = own_objective(function, prepare, name=f"--training.objective {named}")
    else:
        smoothing = config.training.label_smoothing
        predict = predict_with(config.data.test_time_augmentation, config.task)
        losses = _losses(config, fields) if config.training.class_weights or config.data.ignore_index else {}
        objective = objective_of(
            config.task, prepare, policy, label_smoothing=smoothing, chunk=chunk, predict=predict, **losses
        )
    return _with_metrics(config, objective, abstract, fields) if config.training.metrics else objective


def _losses(config: Config, fields: Fields) -> dict[str, Any]:
    """Builds the losses for class weights and ignored labels, as arguments of `objective_of`.

    Raises:
      UsageError: the number of weights is not the number of classes.
    """
    from mpjax.training.class_weights import by_class, pixels_by_class  # local, because few runs need either

    weights, smoothing = config.training.class_weights, config.training.label_smoothing
    field: Any = fields["mask" if config.task == "segmentation" else "label"]
    if weights and len(weights) != field.num_classes:
        raise UsageError(
            f"--training.class_weights has {len(weights)} weights, but '{config.data.name}' has {field.num_classes} "
            "classes; wanted one for each class, in the order of their numbers"
        )
    if config.task != "segmentation":
        return {"comparison": by_class(weights, smoothing, ignores=bool(config.data.ignore_index))}
    # Every segmentation handles ignored pixels.
    return {"pixel_loss": functools.partial(pixels_by_class, weights)} if weights else {}


def _with_metrics(config: Config, objective: Objective, abstract: nnx.Module, fields: Fields) -> Objective:
    specs = config.training.metrics
    functions = {spec.rpartition(":")[2]: load_function(spec, flag="--training.metrics") for spec in specs}
    if len(functions) < len(specs):
        raise UsageError(f"--training.metrics {' '.join(specs)}: wanted functions of different names")
    batch = jax.eval_shape(lambda batch: objective.prepare(batch, None), batch_shapes(fields, 2))
    outputs: Any = nnx.eval_shape(objective.outputs_of, abstract, batch)
    if not config.training.objective:
        return with_metrics(objective, functions, outputs, batch)
    if OUTPUTS not in outputs:
        raise UsageError(
            f"--training.metrics: --training.objective {config.training.objective} returns no `{OUTPUTS}` to compute "
            "them from; return the outputs of the model beside the loss, or the metric itself"
        )
    return with_metrics(objective, functions, outputs, batch, of_outputs=lambda found: found[OUTPUTS])


def metrics_of(task: Task, fields: Fields) -> tuple[str, ...]:
    """The names of the metrics of a test set."""
    values: Any = nnx.eval_shape(task.objective.measure, task.abstract, batch_shapes(fields, 2))
    return task.objective.names(values)
