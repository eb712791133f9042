"""Builds the parts of a run: settings in; precision, data, model, optimizer and compiled steps out."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mpjax import data, models
from mpjax.config import Config
from mpjax.config.folders import cache_folder, data_folder
from mpjax.config.limits import check
from mpjax.diagnosis.training import make_probe
from mpjax.loop.when import When
from mpjax.plan.shapes import batch_shapes
from mpjax.precision.calls import modules_of
from mpjax.precision.casting import autocast, full_precision
from mpjax.precision.modules import PolicyReport, apply_policy, scope_policy, storage_policy
from mpjax.precision.policy import Policy
from mpjax.training import TrainState, make_eval_step, make_train_step
from mpjax.training.feed import Feed, feed_of
from mpjax.training.layout import FSDP, TENSOR, Layout, divide
from mpjax.training.mesh import compiler_options, make_mesh, own_rows
from mpjax.training.objectives import objective_of
from mpjax.training.optimizer import learning_rate_schedule, update_rule, with_precision
from mpjax.training.precision_plan import PrecisionPlan, plan_precision
from mpjax.training.remat import apply_remat, blocks_of
from mpjax.training.setup import Task, check_fit, initial_state, state_shapes
from mpjax.training.state import Arrays, take_apart, uncast
from mpjax.training.tensor import tensor_axes
from mpjax.training.train_step import make_train_call


CHECKPOINTS = "checkpoints"
"""The folder of checkpoints inside a run's folder."""


ENVIRONMENT_FILE = "environment.json"
"""The file that records versions, devices and the process of a run."""


class Parts(NamedTuple):
    """The parts of a run, before it has a folder and a state.

    Attributes:
      plan: the settled precision settings.
      source: the training and test examples.
      layout: all devices, and how the run's arrays are divided over them.
      compiler_options: XLA's options for the compiled calls.
      batches: training data.
      split: the sharding of a training batch.
      feed: the input of compiled calls, made from the training data.
      tests: evaluation data.
      when: the length of training, and the steps at which to log, evaluate and save.
      task: the model with its policy applied, and its objective.
      task_under: builds the task under another policy.
      tx: the optimizer.
      train_step: `(state, batch) -> (state, metrics)`, compiled at its first call.
      train_call: `(state, fed, count) -> (state, metrics)`: `count` steps, compiled at the first call of each count.
      eval_step: `(params, stats, batch) -> sums`.
      probe: `(state, fed, count) -> Layers`: layer statistics of the first step of a call.
    """

    plan: PrecisionPlan
    source: data.Source
    layout: Layout
    compiler_options: dict[str, Any]
    batches: data.Batches
    split: NamedSharding
    feed: Feed
    tests: data.EvalBatches
    when: When
    task: Task
    task_under: Callable[[Policy], Task]
    tx: optax.GradientTransformation
    train_step: jax.stages.Wrapped
    train_call: jax.stages.Wrapped
    eval_step: Callable
    probe: jax.stages.Wrapped


def make_parts(config: Config) -> Parts:
    """Builds the parts of the run that `config` describes.

    Raises:
      UsageError: the settings are invalid, or the data is missing.
    """
    # Settings
    check(config)
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)
    layout = Layout(make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor))
    batch_size = config.data.batch_size
    split = layout.batch(size=batch_size, accumulate=config.training.accumulate)

    # Data
    source = data.open_source(config.data, data_folder(config), config.task)
    batches = data.train_batches(source, config.data, config.seed, own_rows(split, batch_size))
    tested = config.data.eval_batch_size
    tests = data.eval_batches(source, config.data, own_rows(layout.evaluation(tested), tested))

    # Durations, now that the length of an epoch is known
    def steps(duration) -> int:
        return duration.in_steps(batch_size, batches.steps_per_epoch)

    every = config.loop
    when = When(
        steps(config.steps),
        log=steps(every.log_every),
        evaluate=steps(every.eval_every),
        save=steps(every.save_every),
        layers=steps(config.diagnosis.every),
        per_call=config.training.steps_per_call,
    )
    feed = feed_of(batches, split, most_steps=when.per_call, device_bytes=config.data.on_device_mb * 2**20)

    # Model, precision, optimizer, training step
    fields = data.batch_fields(source, config.data)
    warmup = steps(config.optimizer.warmup)
    task, tx, step_on = make_step(config, plan, fields, steps=when.steps, warmup=warmup)
    layout = make_layout(config, plan, task, fields, layout.mesh)
    train_step = step_on(layout)

    def task_under(policy: Policy) -> Task:
        return make_task(config, plan._replace(policy=policy), fields)

    # The compiled calls, the evaluation and the probe
    train_call = make_train_call(train_step, feed.batch)
    eval_step = make_eval_step(task.structure, task.objective.measure, cast=task.cast, layout=layout)
    look = make_probe(task, tx, seed=config.seed, accumulate=config.training.accumulate)
    probe = jax.jit(lambda state, fed, count: look(state, feed.batch(fed, 0)), static_argnums=2)
    return Parts(
        plan=plan,
        source=source,
        layout=layout,
        compiler_options=compiler_options(layout.mesh, overlap=config.mesh.overlap),
        batches=batches,
        split=split,
        feed=feed,
        tests=tests,
        when=when,
        task=task,
        task_under=task_under,
        tx=tx,
        train_step=train_step,
        train_call=train_call,
        eval_step=eval_step,
        probe=probe,
    )


def make_task(config: Config, plan: PrecisionPlan, fields: data.Fields) -> Task:
    """Builds the task that `config` describes, on batches of these fields, without creating an array.

    Raises:
      UsageError: a rule of the policy matches no module, or the model has no blocks to rematerialise.
    """
    autocasting = plan.mode == "autocast"
    policy = storage_policy(plan.policy) if autocasting else plan.policy

    def build(key: jax.Array) -> nnx.Module:
        return models.build_model(config.model, fields=fields, rngs=nnx.Rngs(key))

    def set_precision(model: nnx.Module) -> PolicyReport:
        report = apply_policy(model, policy)
        apply_remat(model, config.training.remat)
        return report

    def make_model(key: jax.Array) -> nnx.Module:
        set_precision(model := build(key))
        return model

    abstract: Any = nnx.eval_shape(build, jax.random.key(0))
    report = set_precision(abstract)
    # Pixels are not activations: autocast must not cast the operations that augment them.
    prepare = full_precision(functools.partial(data.prepare, config=config.data, fields=fields))
    objective = objective_of(config.task, prepare, policy, label_smoothing=config.training.label_smoothing)
    cast = uncast
    if autocasting:
        cast = functools.partial(
            autocast, policy=scope_policy(abstract, plan.policy), scopes=tuple(modules_of(abstract))
        )
    return Task(take_apart(abstract)[0], objective, cast, report, make_model, abstract)


def make_step(
    config: Config, plan: PrecisionPlan, fields: data.Fields, *, steps: int, warmup: int
) -> tuple[Task, optax.GradientTransformation, Callable[[Layout | None], jax.stages.Wrapped]]:
    """Builds the task that `config` describes, its optimizer, and a function from layout to compiled training step.

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

    def step_on(layout: Layout | None) -> jax.stages.Wrapped:
        return make_train_step(
            task.structure,
            tx,
            task.objective.loss_of,
            prepare=task.objective.prepare,
            cast=task.cast,
            learning_rate=schedule,
            accumulate=config.training.accumulate,
            ema=config.training.ema,
            seed=config.seed,
            layout=layout,
        )

    return task, tx, step_on


def make_layout(config: Config, plan: PrecisionPlan, task: Task, fields: data.Fields, mesh: Mesh) -> Layout:
    """Divides the arrays of a run over a mesh.

    Raises:
      UsageError: as `tensor_axes`.
    """
    _, params, stats = take_apart(task.abstract)
    parts = mesh.shape[TENSOR]
    divided = divide(params, mesh, tensor_axes(task.abstract, parts, config.mesh.rules) if parts > 1 else {})
    layout = Layout(mesh, divided=divided, reduce_dtype=plan.policy.reduce_dtype, batch_norm=config.training.batch_norm)
    if mesh.shape[FSDP] == 1:
        return layout
    batch = jax.eval_shape(lambda batch: task.objective.prepare(batch, None), batch_shapes(fields, 1))
    travels, given = task.narrowed(params, stats, batch)
    return dataclasses.replace(layout, travels=travels, given=given, blocks=tuple(blocks_of(task.abstract)))


def fresh_state(config: Config, parts: Parts, pretrained: Arrays | None = None) -> TrainState:
    """Returns the state before the first step; `pretrained` arrays, by path, replace initial values."""
    return initial_state(
        parts.task,
        parts.tx,
        seed=config.seed,
        ema=config.training.ema > 0,
        layout=parts.layout,
        pretrained=pretrained,
    )


def resumed_state(config: Config, parts: Parts, adopt: Callable[[TrainState], TrainState]) -> TrainState:
    """Returns the state that `adopt` makes of the shapes of a state; what it leaves as shapes has initial values.

    So the devices do not hold an initial state beside the adopted one.
    """
    state = adopt(state_shapes(parts.task, parts.tx, ema=config.training.ema > 0, layout=parts.layout))

    def is_missing(leaf) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    if not any(map(is_missing, jax.tree.leaves(state))):
        return state
    return jax.tree.map(lambda leaf, new: new if is_missing(leaf) else leaf, state, fresh_state(config, parts))


def set_up_jax(config: Config, plan: PrecisionPlan) -> None:
    """Keeps compiled programs in the cache folder, and enables x64 for a float64 policy; call it before any array."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder(config) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if plan.float64:
        jax.config.update("jax_enable_x64", True)
