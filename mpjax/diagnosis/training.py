"""The training step as a program to look into: its diagnosis, and statistics of its layers while it trains."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from mpjax import data
from mpjax.config import Config
from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.fastest import Fastest, fastest_program
from mpjax.diagnosis.layer_probe import read_step, read_updates
from mpjax.diagnosis.layers import LayerRecorder, Layers
from mpjax.diagnosis.one_step import diagnose_program
from mpjax.diagnosis.program import Program, program_of
from mpjax.diagnosis.progress import SILENT, Progress
from mpjax.diagnosis.update import Optimizer
from mpjax.precision.loss_scale import loss_scale_state
from mpjax.precision.policy import Policy
from mpjax.precision.skip_step import optax_promotion
from mpjax.training.precision_plan import PrecisionPlan
from mpjax.training.setup import Task, make_task
from mpjax.training.state import TrainState, step_key, take_apart


def diagnose_step(
    config: Config,
    plan: PrecisionPlan,
    source: data.Source,
    state: TrainState,
    batch: Mapping[str, jax.Array],
    *,
    loss_scale: float | None = None,
    tolerance: float = 0.05,
    search: bool = True,
    progress: Progress = SILENT,
    tx: optax.GradientTransformation | None = None,
) -> Diagnosis:
    """Diagnoses the step that `state` takes on `batch`, forward and backward.

    Args:
      config: the run's settings.
      plan: its precision decision; with a policy in full precision there is float32 alone to look at.
      source: its examples, for the shapes of the model.
      state: before the step.
      batch: of the step; all of it, also where the run takes it in micro-batches.
      loss_scale: of the step; by default the state's.
      tolerance: as of `mpjax.diagnose`.
      search: as of `mpjax.diagnose`.
      progress: is told how far it is.
      tx: the run's optimizer, if the update is to be looked at too.
    """
    make = _maker(config, plan, source, state, batch)
    scale = float(loss_scale_state(state.opt_state).scale) if loss_scale is None else loss_scale
    optimizer = None if tx is None else Optimizer(tx, state.params, state.opt_state)
    return diagnose_program(make, plan.policy, scale, tolerance, search, progress, optimizer)


def fastest_of_step(
    config: Config,
    plan: PrecisionPlan,
    source: data.Source,
    state: TrainState,
    batch: Mapping[str, jax.Array],
    *,
    tolerance: float = 0.05,
) -> Fastest:
    """As `fastest_policy`, for the step that `state` takes on `batch`; arguments as of `diagnose_step`."""
    return fastest_program(_maker(config, plan, source, state, batch), tolerance)


def _maker(config: Config, plan: PrecisionPlan, source: data.Source, state: TrainState, batch):
    """Policy to the step's program under it."""
    fields = data.batch_fields(source, config.data)

    def make(policy: Policy) -> Program:
        task = make_task(config, plan._replace(policy=policy), fields)
        return program_of_step(task, config.seed, state, batch)

    return make


def program_of_step(task: Task, seed: int, state: TrainState, batch: Mapping[str, jax.Array]) -> Program:
    """The step that `state` takes on `batch`, forward and backward; its parameters are the state's whatever theirs."""
    key = step_key(seed, state)
    dtypes = {name: leaf.dtype for name, leaf in take_apart(task.abstract)[1].items()}
    params = {name: value.astype(dtypes[name]) for name, value in state.params.items()}

    @task.cast
    def loss_of(params, stats, key, batch):
        model = task.structure.assemble(params, stats, key)
        model.train()
        return task.objective.loss(model, batch, key)[0]

    ruled = [row.path for row in task.precision if row.compute_dtype is not None]
    others = {"statistics": state.stats, "key": key, "batch": batch}
    return program_of(loss_of, params, others, before=state.params, ruled=ruled)


def make_probe(
    task: Task, tx: optax.GradientTransformation, *, seed: int = 0, accumulate: int = 1
) -> Callable[[TrainState, Mapping[str, jax.Array]], Layers]:
    """The compiled function that reads the layers of the step that a state takes on a batch; it changes neither.

    Args:
      task: model, precision, objective.
      tx: the optimizer, inside one of the loss-scaling wrappers.
      seed: as of `make_train_step`.
      accumulate: as of `make_train_step`; of so many micro-batches the first is read.
    """

    @jax.jit
    def probe(state: TrainState, batch) -> Layers:
        program = program_of_step(task, seed, state, jax.tree.map(lambda x: x[::accumulate], batch))
        recorder = LayerRecorder()
        read = read_step(program, loss_scale_state(state.opt_state).scale, recorder)
        grads = {name: read[name].astype(param.dtype) for name, param in state.params.items()}
        updates: Any
        updates, _ = tx.update(grads, state.opt_state, state.params)
        with optax_promotion():
            after: Any = optax.apply_updates(state.params, updates)
        read_updates(recorder, updates, state.params, after)
        return recorder.layers()

    return probe
