"""Builds a run from its settings: precision, data, model, optimizer and jitted steps; and creates its states."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from mpjax.commands.jax_settings import set_up_jax
from mpjax.commands.learner import Learner, make_learner, make_task
from mpjax.commands.outside_files import compare_files
from mpjax.config.folders import data_folder
from mpjax.config.limits import check
from mpjax.config.schema import Config, with_settings
from mpjax.data.batches import eval_batches, train_batches
from mpjax.data.example_reader import batch_fields
from mpjax.data.examples import Source
from mpjax.data.labels import check_labels
from mpjax.data.open import open_source
from mpjax.data.stream import Batches, EvalBatches
from mpjax.errors import UsageError
from mpjax.loop.stored import BASE, CHECKPOINTS, read_checkpoint
from mpjax.loop.when import When
from mpjax.models.scan import apart_in, stacks_of
from mpjax.precision.calls import modules_of
from mpjax.precision.policy import Policy
from mpjax.training.eval_step import make_eval_step
from mpjax.training.feed import Feed, feed_of, make_train_call, own_rows
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh
from mpjax.training.named_rule import find_rule
from mpjax.training.packing import Packing
from mpjax.training.precision_plan import PrecisionPlan, plan_precision
from mpjax.training.setup import Task, initial_state, state_shapes
from mpjax.training.state import Arrays, TrainState, without_shared_buffers
from mpjax.training.xla_options import compiler_options


if TYPE_CHECKING:  # few runs have statistics of their columns
    from mpjax.data.encoding import Encoding


ENVIRONMENT_FILE = "environment.json"
"""The file that records versions, devices and the process of a run."""


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """All that a run needs but its folder and its state.

    A packed state has its small arrays concatenated into few (`training/packing.py`); an unpacked state has each array
    by its path.

    Attributes:
      learner: the settings, the model, its objective, its precision and the optimizer.
      layout: all devices, and the division of the run's arrays over them.
      packing: packs states for `train_step` and `train_call`, and unpacks their results; all other code has unpacked
        states.
      source: the training and test examples.
      batches: training data.
      batch_sharding: the sharding of a training batch.
      feed: makes the inputs of `train_call`, named `fed`, from the training data.
      tests: evaluation data.
      when: the length of training, and the steps at which to log, evaluate and save.
      train_step: `(packed, batch) -> (packed, metrics)`, compiled at its first call; donates the state.
      train_call: `(packed, fed, count) -> (packed, metrics)`: `count` steps, compiled at the first call of each count;
        donates the state.
      eval_step: `(params, stats, batch) -> sums`, of unpacked parameters and statistics.
    """

    learner: Learner
    layout: Layout
    packing: Packing
    source: Source
    batches: Batches
    batch_sharding: NamedSharding
    feed: Feed
    tests: EvalBatches
    when: When
    train_step: jax.stages.Wrapped
    train_call: jax.stages.Wrapped
    eval_step: Callable

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.learner.config

    @property
    def plan(self) -> PrecisionPlan:
        """The precision of the run: its policy, casts, loss scale and master weights."""
        return self.learner.plan

    @property
    def task(self) -> Task:
        """The model and its objective."""
        return self.learner.task

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The XLA options, by name, with which the training calls are compiled."""
        return compiler_options(self.layout.mesh, overlap=self.config.mesh.overlap)

    def task_under(self, policy: Policy) -> Task:
        """Builds the model and objective of the run under another policy, with one module per block (no `scan_blocks`).

        Its states have one array per block, as `block_by_block` returns them.
        """
        # In a loop, the layers of all blocks have one name.
        unrolled = with_settings(self.config, {"model.scan_blocks": False})
        return make_task(unrolled, self.plan._replace(policy=policy), self.learner.fields)

    def block_by_block(self, state: TrainState) -> TrainState:
        """Splits each array of an unpacked state that stacks all blocks (`scan_blocks`) into one array per block.

        This includes the arrays of the optimizer state, for the same optimizer. A state without stacks is returned as
        it is.
        """
        return apart_in(state, stacks_of(self.task.abstract))


def require_folder_for_task(config: Config) -> None:
    """Raises UsageError if the model is a folder of Hugging Face files for other tasks, before the data are opened."""
    if config.model.folder:
        from mpjax.models.folder_kinds import require_task  # local, as few runs need files of Hugging Face
        from mpjax.models.pretrained.files import find_folder

        require_task(str(config.model.name), find_folder(config.model.folder), config.task)


def build_run(config: Config, stored: "Encoding | None" = None) -> Run:
    """Opens the data and builds the run that `config` describes; no state is created and nothing is compiled yet.

    It also changes JAX's configuration (`set_up_jax`). Sizes that are `auto` have to be replaced before (`fitted`).

    Args:
      config: the settings.
      stored: the statistics of a stored run, by which its data are read again (`encoding_of`); None: a new run's.

    Raises:
      UsageError: the settings are invalid, the data is missing, or the model, the task and the devices do not fit.
    """
    check(config)
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)
    find_rule(config.optimizer)  # before any slow work
    require_folder_for_task(config)
    mesh = make_mesh(**config.mesh.sizes)
    devices = Layout(mesh)
    batch_size, tested = config.data.batch_size, config.data.tested
    batch_sharding = devices.batch(size=batch_size, accumulate=config.training.accumulate)

    source = open_source(config.data, data_folder(config), config.task, stored)
    batches = train_batches(source, config.data, config.seed, own_rows(batch_sharding, batch_size))
    tests = eval_batches(source, config.data, own_rows(devices.evaluation(tested), tested))

    # Durations come after the data, which fixes the length of an epoch.
    def steps(duration) -> int:
        return duration.in_steps(batch_size, batches.steps_per_epoch)

    when = When(
        steps(config.steps),
        log=steps(config.loop.log_every),
        evaluate=steps(config.loop.eval_every),
        save=steps(config.loop.save_every),
        layers=steps(config.diagnosis.every),
        per_call=config.training.steps_per_call,
    )
    feed = feed_of(batches, batch_sharding, most_steps=when.per_call, device_bytes=config.data.on_device_mb * 2**20)

    fields = batch_fields(source, config.data)
    check_labels(fields, batches, tests, config.data)
    learner = make_learner(config, plan, fields, steps=when.steps, warmup=steps(config.optimizer.warmup))
    layout, packing, train_step = learner.on(mesh)
    task = learner.task
    return Run(
        learner=learner,
        layout=layout,
        packing=packing,
        source=source,
        batches=batches,
        batch_sharding=batch_sharding,
        feed=feed,
        tests=tests,
        when=when,
        train_step=train_step,
        train_call=make_train_call(train_step, feed.batch),
        eval_step=make_eval_step(task.structure, task.objective.measure, cast=task.cast, layout=layout),
    )


def layer_probe(run: Run) -> jax.stages.Wrapped:
    """Builds the jitted `(packed, fed, count) -> Layers`, the layer statistics of the first step of a training call.

    It takes the arguments of `train_call`, but neither donates nor changes the state. `count` is static.
    """
    from mpjax.diagnosis.training import make_probe  # local, like all imports that few runs need

    single = run.task_under(run.plan.policy) if stacks_of(run.task.abstract) else run.task
    accumulate = 1 if run.task.objective.divides else run.config.training.accumulate
    look = make_probe(single, run.learner.tx, seed=run.config.seed, accumulate=accumulate)

    def probe(packed, fed, count: int):
        del count
        return look(run.block_by_block(run.packing.unpack(packed)), run.feed.batch(fed, 0))

    return jax.jit(probe, static_argnums=2)


def fresh_state(run: Run, pretrained: Arrays | None = None) -> TrainState:
    """Creates the unpacked state before the first step, divided over the devices.

    Initial values are random by `config.seed`. Modules with a method `from_images` compute theirs from the training
    images. `pretrained` arrays, by path, replace both.
    """
    from_data: Arrays = {}
    if any(hasattr(module, "from_images") for module in modules_of(run.task.abstract).values()):
        from mpjax.training.from_images import arrays_from_images

        from_data = arrays_from_images(run.task, run.source, run.config.data)
    return initial_state(
        run.task,
        run.learner.tx,
        seed=run.config.seed,
        ema=run.config.training.ema > 0,
        layout=run.layout,
        pretrained={**from_data, **(pretrained or {})},
    )


def resumed_state(run: Run, adopt: Callable[[TrainState], TrainState]) -> TrainState:
    """Calls `adopt` with an abstract state (shapes in place of arrays), and completes the state that it returns.

    `adopt` replaces shapes by the arrays of a checkpoint. Only if shapes are left, an initial state is created, and
    they get its values. An array that `adopt` uses twice, such as parameters at which a moving average starts, is
    copied, so that the state can be donated.
    """
    state = adopt(state_shapes(run.task, run.learner.tx, ema=run.config.training.ema > 0, layout=run.layout))

    def is_missing(leaf) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    if any(map(is_missing, jax.tree.leaves(state))):
        state = jax.tree.map(lambda leaf, new: new if is_missing(leaf) else leaf, state, fresh_state(run))
    return without_shared_buffers(state)


def stored_encoding(config: Config, folder: pathlib.Path) -> "Encoding | None":
    """Reads the statistics by which a stored run reads its columns; None for data without any.

    Raises:
      UsageError: as `encoding_of`.
    """
    if not config.is_encoded:
        return None
    from mpjax.commands.encoding_of_run import encoding_of  # local, like all imports that few runs need

    return encoding_of(folder)


def read_whole(
    task: Task,
    config: Config,
    source: Source,
    layout: Layout,
    folder: pathlib.Path,
    which: str = "latest",
    **reading: Any,
) -> tuple[int, dict[str, Any], dict]:
    """Reads a checkpoint in a run's folder by `read_checkpoint`, and adds frozen weights that it leaves to their file.

    `source` is the run's data now.

    Raises:
      UsageError: as `read_checkpoint` or `compare_files`, or the file of the frozen weights is not there or has others.

    Warns:
      CheckpointWarning: as `read_checkpoint` or `compare_files`.
    """
    position, saved, about = read_checkpoint(folder / CHECKPOINTS, which, **reading)
    compare_files(config, source, folder, about)
    if BASE in about:
        from mpjax.commands.base_weights import with_base  # local, like all imports that few runs need

        saved = with_base(task, config.model, saved, about, layout)
    return position, saved, about


def model_with(run: Run, state: TrainState) -> nnx.Module:
    """Builds the model of a packed state in evaluation mode, with copies of its arrays, which the next step donates.

    The parameters are the trained ones, not their moving average.

    Raises:
      UsageError: a step has run since, so that the arrays of the state are gone.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise UsageError(
            "model() of an evaluation was called after the next step, when its arrays were gone; call model() in "
            "`evaluated` and keep the model that it returns, which is a copy"
        )
    state = run.packing.unpack(state)
    model = run.task.structure.assemble(*jax.tree.map(jnp.copy, (state.params, state.stats)))
    model.eval()
    return model
