"""What a run is made of: settings in; precision, data, model, optimizer and compiled steps out."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from mpjax import data
from mpjax.config import Config
from mpjax.config.folders import cache_folder, data_folder
from mpjax.config.limits import check
from mpjax.diagnosis.training import make_probe
from mpjax.loop.when import When
from mpjax.training import TrainState, make_eval_step
from mpjax.training.feed import Feed, feed_of
from mpjax.training.mesh import batch_sharding, data_mesh, replicated
from mpjax.training.precision_plan import PrecisionPlan, plan_precision
from mpjax.training.setup import Task, initial_state, make_step
from mpjax.training.state import Arrays
from mpjax.training.train_step import make_train_call


CHECKPOINTS = "checkpoints"
"""The folder of checkpoints inside a run's folder."""


ENVIRONMENT_FILE = "environment.json"
"""With what the run was made, and by which process."""


class Parts(NamedTuple):
    """What a run is made of, before it has a folder and a state.

    Attributes:
      plan: the precision decision.
      source: the training and test examples.
      mesh: all devices.
      batches: training data.
      split: how a training batch is divided among devices.
      feed: what compiled calls are given of the training data.
      tests: evaluation data.
      when: the length of training, and what is due when.
      task: model, precision, objective.
      tx: the optimizer.
      train_step: `(state, batch) -> (state, metrics)`, compiled at its first call.
      train_call: `(state, fed, count) -> (state, metrics)`: so many steps, compiled at the first call of each count.
      eval_step: `(params, stats, batch) -> sums`.
      probe: `(state, fed, count) -> Layers`: of the first step of a call.
    """

    plan: PrecisionPlan
    source: data.Source
    mesh: Mesh
    batches: data.Batches
    split: NamedSharding
    feed: Feed
    tests: data.EvalBatches
    when: When
    task: Task
    tx: optax.GradientTransformation
    train_step: Callable
    train_call: Callable
    eval_step: Callable
    probe: Callable


def make_parts(config: Config) -> Parts:
    """The parts of the run that `config` describes.

    Raises:
      UsageError: settings that cannot be, data that is not there.
    """
    # Settings
    check(config)
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)
    mesh = data_mesh()
    batch_size = config.data.batch_size
    split = batch_sharding(mesh, batch_size=batch_size, accumulate=config.training.accumulate)

    # Data
    source = data.open_source(config.data, data_folder(config), config.task)
    share = data.Share(jax.process_index(), jax.process_count())
    batches = data.train_batches(source, config.data, config.seed, share)
    tests = data.eval_batches(source, config.data, share)

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
    task, tx, train_step = make_step(config, plan, fields, steps=when.steps, warmup=warmup)

    # What is compiled around it
    train_call = make_train_call(train_step, feed.batch)
    eval_step = make_eval_step(task.structure, task.objective.measure, cast=task.cast)
    look = make_probe(task, tx, seed=config.seed, accumulate=config.training.accumulate)
    probe = jax.jit(lambda state, fed, count: look(state, feed.batch(fed, 0)), static_argnums=2)
    return Parts(
        plan, source, mesh, batches, split, feed, tests, when, task, tx, train_step, train_call, eval_step, probe
    )


def fresh_state(config: Config, parts: Parts, pretrained: Arrays | None = None) -> TrainState:
    """The state before the first step, on all devices, with the pretrained arrays by path in it."""
    return initial_state(
        parts.task,
        parts.tx,
        seed=config.seed,
        ema=config.training.ema > 0,
        sharding=replicated(parts.mesh),
        pretrained=pretrained,
    )


def set_up_jax(config: Config, plan: PrecisionPlan) -> None:
    """Compiled programs are kept in the cache folder; float64 policies switch 64-bit arrays on. Before any array."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder(config) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if plan.float64:
        jax.config.update("jax_enable_x64", True)
