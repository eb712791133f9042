"""Builds model, optimizer and training step from the settings, and checks that the model fits its task."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpjax import models
from mpjax.config import Config
from mpjax.config.choices import TaskName
from mpjax.config.schema import Model
from mpjax.data import Fields
from mpjax.errors import UsageError
from mpjax.models.pretrained import load_pretrained
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.precision.calls import modules_of
from mpjax.precision.casting import autocast
from mpjax.precision.dtypes import FLOAT32
from mpjax.precision.modules import PolicyReport, apply_policy, scope_policy, storage_policy
from mpjax.training.objectives import Objective, objective_of
from mpjax.training.optimizer import learning_rate_schedule, update_rule, with_precision
from mpjax.training.precision_plan import PrecisionPlan
from mpjax.training.remat import apply_remat
from mpjax.training.state import Arrays, Structure, TrainState, create_state, take_apart, uncast
from mpjax.training.train_step import make_train_step


Shapes = tuple[jax.ShapeDtypeStruct, ...]

_BATCH = 2


def check_fit(model: nnx.Module, task: TaskName, fields: Mapping[str, Any], *, name: str, dtype: Any = FLOAT32) -> None:
    """Checks that the model fits the task, by tracing its forward pass on a batch of two.

    Args:
      model: the model, which may be abstract.
      task: the task to learn.
      fields: the fields of a batch.
      name: the name of the model in messages.
      dtype: the dtype of the images.

    Raises:
      UsageError: the model takes other arguments, or returns logits of another shape.
    """
    inputs, wanted = _call(task, fields, dtype)
    try:
        inspect.signature(model).bind(*inputs)
    except TypeError as error:
        raise UsageError(
            f"--model.name {name} cannot be called for --task {task}: {error}; wanted {_SIGNATURES[task]}"
        ) from error
    found = nnx.eval_shape(lambda model, *inputs: model(*inputs), model, *inputs)
    shape = getattr(found, "shape", type(found).__name__)
    if shape != wanted:
        raise UsageError(
            f"--model.name {name} gives {shape} for a batch of {_BATCH}; wanted logits {wanted}: {_SIGNATURES[task]}"
        )


_SIGNATURES: Mapping[TaskName, str] = {
    "classification": "images [B, H, W, C] -> logits [B, num_classes]",
    "segmentation": "images [B, H, W, C] -> logits [B, H, W, num_classes]",
    "text_classification": "tokens [B, T], lengths [B] -> logits [B, num_classes]",
    "language_modeling": "tokens [B, T] -> logits [B, T, vocabulary]",
}


def _call(task: TaskName, fields: Mapping[str, Any], dtype: Any) -> tuple[Shapes, tuple[int, ...]]:
    """Returns the abstract inputs of the model and the expected shape of its logits."""

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((_BATCH, *shape), dtype)

    if "tokens" in fields:
        tokens = fields["tokens"]
        if task == "language_modeling":
            return (of(tokens.length - 1),), (_BATCH, tokens.length - 1, tokens.vocabulary)
        return (of(tokens.length), of()), (_BATCH, fields["label"].num_classes)
    height, width, _ = fields["image"].shape
    images = (of(*fields["image"].shape, dtype=dtype),)
    if task == "segmentation":
        return images, (_BATCH, height, width, fields["mask"].num_classes)
    return images, (_BATCH, fields["label"].num_classes)


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with its policy applied, and its objective.

    Attributes:
      structure: the model taken apart.
      objective: the loss and the metrics.
      cast: adds the policy's casts to a pure function that calls the model; the identity if the model casts itself.
      precision: the report of each submodule's dtypes.
      make_model: a function from a key to the model with initial values.
      abstract: the model with shapes and dtypes in place of arrays.
    """

    structure: Structure
    objective: Objective
    cast: Callable[[Callable], Callable]
    precision: PolicyReport
    make_model: Callable[[jax.Array], nnx.Module]
    abstract: nnx.Module


def make_task(config: Config, plan: PrecisionPlan, fields: Fields) -> Task:
    """Builds the task that `config` describes, on batches of these fields, without creating an array.

    Raises:
      UsageError: a rule of the policy matches no module, or the model has no blocks to rematerialise.
    """

    autocasting = plan.mode == "autocast"
    policy = storage_policy(plan.policy) if autocasting else plan.policy

    def make_model(key: jax.Array) -> nnx.Module:
        model = models.build_model(config.model, fields=fields, rngs=nnx.Rngs(key))
        apply_policy(model, policy)
        apply_remat(model, config.training.remat)
        return model

    abstract: Any = nnx.eval_shape(make_model, jax.random.key(0))
    objective = objective_of(config, policy, fields)
    cast = uncast
    if autocasting:
        cast = functools.partial(
            autocast, policy=scope_policy(abstract, plan.policy), scopes=tuple(modules_of(abstract))
        )
    return Task(take_apart(abstract)[0], objective, cast, apply_policy(abstract, policy), make_model, abstract)


def make_step(
    config: Config, plan: PrecisionPlan, fields: Fields, *, steps: int, warmup: int
) -> tuple[Task, optax.GradientTransformation, Callable]:
    """Builds the task that `config` describes, its optimizer, and its compiled training step.

    Args:
      config: the settings of the run.
      plan: the precision of the run.
      fields: the fields of a batch.
      steps: the length of training, which schedules need.
      warmup: the steps until the peak of the learning rate.

    Raises:
      UsageError: as `make_task`, or the model does not fit the task.
    """
    task = make_task(config, plan, fields)
    check_fit(task.abstract, config.task, fields, name=config.model.name, dtype=plan.policy.compute_dtype)
    schedule = learning_rate_schedule(config.optimizer, steps=steps, warmup=warmup)
    tx = with_precision(
        update_rule(config.optimizer, schedule),
        config.precision,
        loss_scale=plan.loss_scale,
        masters=plan.master_weights,
    )
    train_step = make_train_step(
        task.structure,
        tx,
        task.objective.loss,
        cast=task.cast,
        learning_rate=schedule,
        accumulate=config.training.accumulate,
        ema=config.training.ema,
        seed=config.seed,
    )
    return task, tx, train_step


def pretrained_arrays(task: Task, config: Model) -> tuple[Arrays, PretrainedReport | None]:
    """Loads parameters and statistics from `config.pretrained`, by path and in the stored dtypes, and their report.

    Raises:
      UsageError: as `mpjax.load_pretrained`.
    """
    if not config.pretrained:
        return {}, None
    model: Any = nnx.eval_shape(task.make_model, jax.random.key(0))
    found = load_pretrained(model, config.pretrained, skip=config.pretrained_skip)
    _, params, stats = take_apart(model)
    return {row.path: (params | stats)[row.path] for row in found if row.key is not None}, found


def make_state(
    task: Task, tx: optax.GradientTransformation, key: jax.Array, pretrained: Arrays, *, ema: bool
) -> TrainState:
    """Returns the state before the first step.

    Args:
      task: the task to train.
      tx: the optimizer.
      key: the random key of the initial values.
      pretrained: parameters and statistics by path that replace initial values.
      ema: True to keep a moving average of the parameters.
    """
    _, params, stats = take_apart(task.make_model(key))
    params, stats = ({n: pretrained.get(n, value) for n, value in part.items()} for part in (params, stats))
    return create_state(params, stats, tx, ema=ema)


def initial_state(
    task: Task,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    ema: bool,
    sharding,
    pretrained: Arrays | None = None,
) -> TrainState:
    """Creates the state of `make_state` directly on its devices, with the given sharding."""
    make = functools.partial(make_state, task, tx, ema=ema)
    return jax.jit(make, out_shardings=sharding)(jax.random.key(seed), pretrained or {})
