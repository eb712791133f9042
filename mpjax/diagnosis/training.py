"""Diagnoses the trainer's step or evaluation, and builds the function that reads layer statistics during training."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.fastest import Fastest, fastest_program
from mpjax.diagnosis.layer_probe import read_step, read_updates
from mpjax.diagnosis.layers import LayerRecorder, Layers
from mpjax.diagnosis.one_step import diagnose_program
from mpjax.diagnosis.program import Program, program_of
from mpjax.diagnosis.progress import SILENT, Progress
from mpjax.diagnosis.update import UpdateRule
from mpjax.precision.modules import ruled_modules
from mpjax.precision.policy import Policy
from mpjax.precision.scale_state import loss_scale_state
from mpjax.precision.skip_step import optax_promotion
from mpjax.training.eval_step import weighted_sums
from mpjax.training.objective import Mean, RunObjective
from mpjax.training.setup import Task
from mpjax.training.state import TrainState, take_apart
from mpjax.training.train_step import step_key


def diagnose_step(
    make_task: Callable[[Policy], Task],
    policy: Policy,
    state: TrainState,
    batch: Mapping[str, jax.Array],
    *,
    seed: int,
    loss_scale: float | None = None,
    tolerance: float = 0.05,
    search: bool = True,
    progress: Progress = SILENT,
    tx: optax.GradientTransformation | None = None,
) -> Diagnosis:
    """Diagnoses the training step that `state` takes on `batch`, forward and backward. The state is not modified.

    Args:
      make_task: builds the run's task under a policy.
      policy: the policy to diagnose. It may be float32: then the step is checked for values that are not finite.
      state: the state before the step.
      batch: the whole batch of the step, also with gradient accumulation.
      seed: the seed of the run's random numbers.
      loss_scale: the loss scale of the step; None takes it from the state.
      tolerance: as in `mpjax.diagnose`.
      search: as in `mpjax.diagnose`.
      progress: receives the progress of the diagnosis.
      tx: the run's optimizer, to also check its update if the step is healthy; None to check none.

    Raises:
      UsageError: a number is not positive and finite, or `loss_scale` is None and the state does not have one scale.
    """
    make = _maker(make_task, state, batch, seed)
    scale = float(loss_scale_state(state.opt_state).scale) if loss_scale is None else loss_scale
    optimizer = None if tx is None else UpdateRule(tx, state.params, state.opt_state)
    return diagnose_program(make, policy, scale, tolerance, search, progress, optimizer)


def diagnose_evaluation(
    make_task: Callable[[Policy], Task],
    policy: Policy,
    state: TrainState,
    batch: Mapping[str, jax.Array],
    *,
    tolerance: float = 0.05,
    search: bool = True,
    progress: Progress = SILENT,
) -> Diagnosis:
    """Diagnoses the evaluation of `batch` with the parameters and statistics of `state`. There is no backward pass.

    Args:
      make_task: as in `diagnose_step`.
      policy: as in `diagnose_step`.
      state: the evaluated state.
      batch: a batch of the test set. Examples of `weight` 0 are ignored.
      tolerance: the largest relative error of the batch's loss.
      search: as in `mpjax.diagnose`.
      progress: receives the progress of the diagnosis.

    Raises:
      UsageError: `tolerance` is not positive and finite.
    """
    return diagnose_program(
        lambda policy: program_of_evaluation(make_task(policy), state, batch), policy, 1.0, tolerance, search, progress
    )


def fastest_of_step(
    make_task: Callable[[Policy], Task],
    state: TrainState,
    batch: Mapping[str, jax.Array],
    *,
    seed: int,
    tolerance: float = 0.05,
) -> Fastest:
    """Searches like `fastest_policy`, for the training step that `state` takes on `batch`.

    The arguments are as in `diagnose_step`.
    """
    return fastest_program(_maker(make_task, state, batch, seed), tolerance)


def _maker(make_task: Callable[[Policy], Task], state: TrainState, batch, seed: int) -> Callable[[Policy], Program]:
    """Makes a function from policy to the program of the step."""
    return lambda policy: program_of_step(make_task(policy), step_key(seed, state), state, batch)


def program_of_step(task: Task, key: jax.Array, state: TrainState, batch: Mapping[str, jax.Array]) -> Program:
    """Traces the training step that `state` takes on `batch` with the random key `key`, forward and backward.

    Gradients of frozen parameters (`task.frozen`) are zero.
    """

    def loss_of(params, stats, key, batch):
        params = {name: jax.lax.stop_gradient(x) if name in task.frozen else x for name, x in params.items()}
        model = task.structure.assemble(params, stats, key)
        model.train()
        return task.objective.loss(model, batch, key)[0].value

    others = {"statistics": state.stats, "key": key, "batch": batch}
    return _traced(task, loss_of, state, others)


def program_of_evaluation(task: Task, state: TrainState, batch: Mapping[str, jax.Array]) -> Program:
    """Traces the mean loss of a batch of the test set in evaluation, by its `weight`. All gradients are zero."""

    def loss_of(params, stats, batch):
        model = task.structure.assemble(jax.lax.stop_gradient(params), stats)  # an evaluation has no backward pass
        model.eval()
        return mean_loss(task.objective, model, batch)

    return _traced(task, loss_of, state, {"statistics": state.stats, "batch": batch})


def mean_loss(objective: RunObjective, model, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The mean loss of a batch of the test set, weighted by the batch's `weight`, which is 0 for padding examples.

    It is 0 if all weights are 0 and the objective returns one loss per example.
    """
    sums = weighted_sums(objective.measure(model, batch), batch)
    loss = sums["loss"]
    return loss.value if isinstance(loss, Mean) else loss / jnp.maximum(sums["count"], 1)


def _traced(task: Task, loss_of: Callable, state: TrainState, others: Mapping[str, Any]) -> Program:
    """Traces `loss_of(params, *others.values())`. The parameters take the dtypes of the task, not of the state."""
    dtypes = {name: leaf.dtype for name, leaf in take_apart(task.abstract)[1].items()}
    params = {name: value.astype(dtypes[name]) for name, value in state.params.items()}
    return program_of(task.cast(loss_of), params, others, before=state.params, ruled=ruled_modules(task.abstract))


def make_probe(
    task: Task, tx: optax.GradientTransformation, *, seed: int = 0, accumulate: int = 1
) -> Callable[[TrainState, Mapping[str, jax.Array]], Layers]:
    """Makes a jitted function `(state, batch) -> Layers` that measures each layer in the step a state would take.

    It measures activations, cotangents, gradients and updates, and changes neither the state nor the batch.

    Args:
      task: the model, the precision and the objective.
      tx: the optimizer, inside one of the loss-scaling wrappers.
      seed: as in `make_train_step`.
      accumulate: the number of micro-batches, as in `make_train_step`. Only the first is measured, and the updates are
        those of its gradients alone.
    """

    @jax.jit
    def probe(state: TrainState, batch) -> Layers:
        key, first = step_key(seed, state), jax.tree.map(lambda x: x[::accumulate], batch)
        key = key if accumulate == 1 else jax.random.split(key, accumulate)[0]  # as the step draws for a micro-batch
        program = program_of_step(task, key, state, first)
        recorder = LayerRecorder()
        loss, read = read_step(program, loss_scale_state(state.opt_state).scale, recorder)
        grads = {name: read[name].astype(param.dtype) for name, param in state.params.items()}
        updates: Any
        updates, _ = optax.with_extra_args_support(tx).update(grads, state.opt_state, state.params, value=loss)
        with optax_promotion():
            after: Any = optax.apply_updates(state.params, updates)
        read_updates(recorder, updates, state.params, after)
        return recorder.layers()

    return probe
