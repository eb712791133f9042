"""Builds the parts of a run from its settings: precision, data, model, optimizer and compiled steps."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from mpjax import data
from mpjax.commands.task import make_layout, make_packing, make_step, make_task, set_up_jax
from mpjax.config import Config
from mpjax.config.folders import data_folder
from mpjax.config.limits import check
from mpjax.data.labels import check_labels
from mpjax.errors import UsageError
from mpjax.loop.when import When
from mpjax.models.scan import apart_in, stacks_of
from mpjax.precision.policy import Policy
from mpjax.training import TrainState, make_eval_step
from mpjax.training.feed import Feed, feed_of
from mpjax.training.from_images import arrays_from_images
from mpjax.training.layout import Layout
from mpjax.training.mesh import compiler_options, make_mesh, own_rows
from mpjax.training.named_rule import find_rule
from mpjax.training.packing import Packing
from mpjax.training.precision_plan import PrecisionPlan, plan_precision
from mpjax.training.setup import Task, initial_state, state_shapes
from mpjax.training.state import Arrays, without_shared_buffers
from mpjax.training.train_call import make_train_call


CHECKPOINTS = "checkpoints"
"""The folder of checkpoints inside a run's folder."""


ENVIRONMENT_FILE = "environment.json"
"""The file that records versions, devices and the process of a run."""


class Parts(NamedTuple):
    """The parts of a run, before it has a folder and a state.

    Attributes:
      plan: the settled precision settings.
      source: the training and test examples.
      layout: all devices, and the division of the run's arrays over them.
      compiler_options: XLA options for the compiled calls.
      batches: training data.
      split: the sharding of a training batch.
      feed: the input of compiled calls, made from the training data.
      tests: evaluation data.
      when: the length of training, and the steps at which to log, evaluate and save.
      task: the model with its policy applied, and its objective.
      task_under: builds the task under another policy, with single blocks, for a state `block_by_block`.
      block_by_block: replaces the stacks of a state by single blocks, for the same optimizer.
      tx: the optimizer.
      packing: packs states for the calls below, and unpacks their results; all other code has states by path.
      train_step: `(packed, batch) -> (packed, metrics)`, compiled at its first call.
      train_call: `(packed, fed, count) -> (packed, metrics)`: `count` steps, compiled at the first call of each count.
      eval_step: `(params, stats, batch) -> sums`.
      probe: `(packed, fed, count) -> Layers`: layer statistics of the first step of a call; None without
        `diagnosis.every`.
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
    block_by_block: Callable[[TrainState], TrainState]
    tx: optax.GradientTransformation
    packing: Packing
    train_step: jax.stages.Wrapped
    train_call: jax.stages.Wrapped
    eval_step: Callable
    probe: jax.stages.Wrapped | None


def make_parts(config: Config) -> Parts:
    """Builds the parts of the run that `config` describes.

    Raises:
      UsageError: the settings are invalid, or the data is missing.
    """
    check(config)
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)
    find_rule(config.optimizer)  # before any slow work
    layout = Layout(make_mesh(**config.mesh.sizes))
    batch_size = config.data.batch_size
    split = layout.batch(size=batch_size, accumulate=config.training.accumulate)

    source = data.open_source(config.data, data_folder(config), config.task)
    batches = data.train_batches(source, config.data, config.seed, own_rows(split, batch_size))
    tested = config.data.eval_batch_size
    tests = data.eval_batches(source, config.data, own_rows(layout.evaluation(tested), tested))

    # Durations come after the data, which fixes the length of an epoch.
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

    fields = data.batch_fields(source, config.data)
    check_labels(fields, batches, tests, config.data)
    warmup = steps(config.optimizer.warmup)
    task, tx, step_on = make_step(config, plan, fields, steps=when.steps, warmup=warmup)
    layout = make_layout(config, plan, task, fields, layout.mesh)
    packing = make_packing(config, task, layout)
    train_step = step_on(layout, packing)

    def task_under(policy: Policy) -> Task:
        # In a loop, the layers of all blocks have one name.
        unrolled = dataclasses.replace(config, model=dataclasses.replace(config.model, scan_blocks=False))
        return make_task(unrolled, plan._replace(policy=policy), fields)

    def block_by_block(state: TrainState) -> TrainState:
        return apart_in(state, stacks_of(task.abstract))

    train_call = make_train_call(train_step, feed.batch)
    eval_step = make_eval_step(task.structure, task.objective.measure, cast=task.cast, layout=layout)
    probe = None
    if when.layers:
        from mpjax.diagnosis.training import make_probe

        single = task_under(plan.policy) if stacks_of(task.abstract) else task
        look = make_probe(single, tx, seed=config.seed, accumulate=config.training.accumulate)
        probe = jax.jit(
            lambda packed, fed, count: look(block_by_block(packing.unpack(packed)), feed.batch(fed, 0)),
            static_argnums=2,
        )
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
        block_by_block=block_by_block,
        tx=tx,
        packing=packing,
        train_step=train_step,
        train_call=train_call,
        eval_step=eval_step,
        probe=probe,
    )


def fresh_state(config: Config, parts: Parts, pretrained: Arrays | None = None) -> TrainState:
    """Creates the state before the first step; `pretrained` arrays, by path, replace initial values.

    Modules with `from_images` compute their initial values from the training images.
    """
    from_data = arrays_from_images(parts.task, parts.source, config.data)
    return initial_state(
        parts.task,
        parts.tx,
        seed=config.seed,
        ema=config.training.ema > 0,
        layout=parts.layout,
        pretrained={**from_data, **(pretrained or {})},
    )


def resumed_state(config: Config, parts: Parts, adopt: Callable[[TrainState], TrainState]) -> TrainState:
    """Creates a state by `adopt` from the shapes of a state; leaves that stay shapes get initial values.

    The devices thus do not hold an initial state beside the adopted one. An array that `adopt` uses twice, such as
    parameters at which a moving average starts, is copied.
    """
    state = adopt(state_shapes(parts.task, parts.tx, ema=config.training.ema > 0, layout=parts.layout))

    def is_missing(leaf) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    if any(map(is_missing, jax.tree.leaves(state))):
        state = jax.tree.map(lambda leaf, new: new if is_missing(leaf) else leaf, state, fresh_state(config, parts))
    return without_shared_buffers(state)


def model_with(parts: Parts, state: TrainState) -> nnx.Module:
    """Builds the model of a packed state in evaluation mode, with copies of arrays that the next step donates.

    Raises:
      UsageError: a step has run since.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise UsageError(
            "model() of an evaluation was called after the next step, when its arrays were gone; call model() in "
            "`evaluated` and keep the model that it returns, which is a copy"
        )
    state = parts.packing.unpack(state)
    model = parts.task.structure.assemble(*jax.tree.map(jnp.copy, (state.params, state.stats)))
    model.eval()
    return model
