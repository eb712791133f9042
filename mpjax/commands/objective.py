"""Builds the objective of a run: its task's or the user's own, with the user's metrics."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mpjax.config.schema import Config
from mpjax.config.tasks import TaskName
from mpjax.config.user_code import load_function
from mpjax.data.fields import Fields, batch_shapes
from mpjax.errors import UsageError
from mpjax.precision.policy import Policy
from mpjax.training import objectives
from mpjax.training.losses import cross_entropy_over
from mpjax.training.objective import OUTPUTS, Prepare, RunObjective
from mpjax.training.setup import Task


def choose_objective(
    config: Config, prepare: Prepare, policy: Policy, abstract: nnx.Module, fields: Fields
) -> RunObjective:
    """Builds the objective that `config` names: the task's or the user's own, with the user's metrics.

    Args:
      config: the settings of the run.
      prepare: prepares a batch on the device, as in `RunObjective`.
      policy: the policy of the model.
      abstract: the model with shapes in place of arrays.
      fields: the fields of a batch.

    Raises:
      UsageError: the code that a setting names cannot be used; `training.chunked_loss` is set and the model has no
        methods `features` and `logits`; or the number of class weights is not the number of classes.
    """
    chunk = config.training.chunked_loss
    if chunk and not all(callable(getattr(abstract, name, None)) for name in ("features", "logits")):
        raise UsageError(
            f"--training.chunked_loss {chunk}: {config.model.name} has no methods `features` and `logits` to compute "
            "the logits of some tokens at a time with; write --training.chunked_loss 0"
        )
    if spec := config.training.objective:
        from mpjax.training.user_objective import checked_objective  # local, because most runs have their task's

        function = load_function(spec, flag="--training.objective")
        objective = RunObjective(checked_objective(function, name=f"--training.objective {spec}"), prepare)
    else:
        objective = _of_task(config, prepare, policy, fields)
    return _with_metrics(config, objective, abstract, fields) if config.training.metrics else objective


def _of_task(config: Config, prepare: Prepare, policy: Policy, fields: Fields) -> RunObjective:
    """Builds the objective of the task. What few runs need is imported where it is used.

    Raises:
      UsageError: as `_of_classes` and `_of_vectors`.
    """
    training = config.training
    match config.task:
        case "language_modeling" | "instructions" | "text_to_text" | "transcription":
            function = _of_tokens(config.task)(label_smoothing=training.label_smoothing, chunk=training.chunked_loss)
            return RunObjective(function, prepare, complete=objectives.with_perplexity)
        case "preference":
            from mpjax.training.dpo import preference

            return RunObjective(preference(beta=training.beta), prepare)
        case "embedding" | "image_text":
            return _of_vectors(config, prepare, policy)
        case "diffusion":
            return _of_diffusion(config, prepare, policy, fields)
        case "regression":
            from mpjax.training import regression

            target: Any = fields["target"]
            loss = regression.loss_named(training.loss, training.huber_delta)
            function = regression.regression_objective(policy, target.std, loss)
            return RunObjective(function, prepare, complete=regression.regression_in_order)
        case "multilabel":
            from mpjax.training import multilabel

            function = multilabel.multilabel_objective(policy)
            return RunObjective(function, prepare, complete=multilabel.multilabel_in_order)
        case _:
            return _of_classes(config, prepare, policy, fields)


def _of_tokens(task: TaskName) -> Callable[..., Any]:
    """Returns the function of a task that predicts tokens, which builds its objective."""
    match task:
        case "instructions":
            from mpjax.training.loss_of_answers import instructions

            return instructions
        case "text_to_text":
            from mpjax.training.loss_of_targets import text_to_text

            return text_to_text
        case "transcription":
            from mpjax.training.loss_of_targets import transcription

            return transcription
        case _:
            return objectives.language_modeling


def _of_classes(config: Config, prepare: Prepare, policy: Policy, fields: Fields) -> RunObjective:
    """Builds the objective of a task with classes, with the label smoothing, class weights and ignored labels.

    Raises:
      UsageError: the number of class weights is not the number of classes.
    """
    task, smoothing = config.task, config.training.label_smoothing
    compare, pixel_loss, complete = objectives.equally(smoothing), cross_entropy_over, dict
    weights, ignores = config.training.class_weights, bool(config.data.ignore_index)
    if weights or ignores:
        from mpjax.training import class_weights

        compare, complete = class_weights.by_class(weights, smoothing, ignores=ignores), class_weights.require_counted
        if weights:
            _require_one_for_each_class(config, fields)
            pixel_loss = functools.partial(class_weights.pixels_by_class, weights)
    match task:
        case "segmentation":
            function, complete = objectives.segmentation(policy, pixel_loss=pixel_loss), objectives.require_pixels
        case "text_classification":
            function = objectives.text_classification(compare)
        case "audio_classification":
            from mpjax.training.loss_of_sounds import audio_classification

            function = audio_classification(compare)
        case _:
            function = objectives.classification(policy, compare)
    return RunObjective(function, prepare, complete=complete)


def _of_vectors(config: Config, prepare: Prepare, policy: Policy) -> RunObjective:
    """Builds the objective of embeddings, or of images and texts, which divides a batch into its micro-batches itself.

    Raises:
      UsageError: there are several micro-batches, and products in float8.
    """
    training = config.training
    if training.accumulate > 1 and policy.recipes:
        raise UsageError(
            f"--training.accumulate {training.accumulate} with --task {config.task} and products in float8, whose "
            "scales would be those of one micro-batch: write --training.accumulate 1, or another --precision.policy"
        )
    if config.task == "image_text":
        from mpjax.training.loss_of_images_and_texts import image_text

        return RunObjective(image_text(policy, micro_batches=training.accumulate), prepare, divides=True)
    from mpjax.training.contrastive import embedding

    function = embedding(
        temperature=training.temperature, symmetric=training.symmetric, micro_batches=training.accumulate
    )
    return RunObjective(function, prepare, divides=True)


def _of_diffusion(config: Config, prepare: Prepare, policy: Policy, fields: Fields) -> RunObjective:
    """Builds the objective of diffusion, whose batches get noise where they are prepared."""
    from mpjax.training.loss_of_noise import diffusion, with_noise
    from mpjax.training.noise_levels import noise_schedule

    training, label = config.training, fields.get("label")
    noising = with_noise(
        prepare,
        noise_schedule(training.noise_schedule),
        prediction=training.prediction,
        num_classes=getattr(label, "num_classes", 0),
        drop_label=training.drop_label,
        min_snr=training.min_snr,
    )
    return RunObjective(diffusion(policy), noising)


def _require_one_for_each_class(config: Config, fields: Fields) -> None:
    weights: Any = config.training.class_weights
    field: Any = fields["mask" if config.task == "segmentation" else "label"]
    if len(weights) != field.num_classes:
        raise UsageError(
            f"--training.class_weights has {len(weights)} weights, but '{config.data.name}' has {field.num_classes} "
            "classes; wanted one for each class, in the order of their numbers"
        )


def _with_metrics(config: Config, objective: RunObjective, abstract: nnx.Module, fields: Fields) -> RunObjective:
    from mpjax.training.metrics import checked_metrics  # local, because most runs have none

    specs = config.training.metrics
    functions = {str(spec).rpartition(":")[2]: load_function(spec, flag="--training.metrics") for spec in specs}
    if len(functions) < len(specs):
        raise UsageError(f"--training.metrics {' '.join(map(str, specs))}: wanted functions of different names")
    batch = jax.eval_shape(lambda batch: objective.prepare(batch, None), batch_shapes(fields, 2))
    values: Any = nnx.eval_shape(lambda model, batch: objective.function(model, batch, None), abstract, batch)
    if OUTPUTS not in values and not config.training.objective:
        raise UsageError(
            f"--training.metrics is not for --task {config.task}, which has metrics of its own: leave it out"
        )
    if OUTPUTS not in values:
        raise UsageError(
            f"--training.metrics: --training.objective {config.training.objective} returns no `{OUTPUTS}` to compute "
            "them from; return the outputs of the model beside the loss, or the metric itself"
        )
    outputs = values.pop(OUTPUTS)
    return objective._replace(metrics=checked_metrics(functions, outputs, batch, taken=objective.names(values)))


def metrics_of(task: Task, fields: Fields) -> tuple[str, ...]:
    """The names of the metrics, without `test/`, that an evaluation of a task computes; found by an abstract trace."""
    values: Any = nnx.eval_shape(task.objective.measure, task.abstract, batch_shapes(fields, 2))
    return task.objective.names(values)
