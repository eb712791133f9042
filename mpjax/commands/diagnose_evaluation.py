"""Diagnoses an evaluation: the test loss may be NaN although every training step is healthy.

In training, batch norm normalises with the statistics of the batch. In evaluation it uses running statistics, which lag
behind the parameters, so values may be far larger.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from mpjax.commands.build import Run
from mpjax.commands.diagnosis_files import NO_DTYPE_REPAIRS
from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.progress import SILENT, Progress
from mpjax.diagnosis.training import diagnose_evaluation, mean_loss
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy
from mpjax.training.eval_step import evaluate, make_eval_step
from mpjax.training.setup import Task
from mpjax.training.state import TrainState


def diagnosed_evaluation(
    run: Run,
    policy: Policy,
    state: TrainState,
    *,
    tolerance: float = 0.05,
    search: bool = True,
    progress: Progress = SILENT,
) -> Diagnosis:
    """Diagnoses the first batch of the test set whose loss is not finite; if all are finite, the first batch.

    The verdict is "not_precision" if the loss of the whole test set is not finite in float32 either, or if the compiled
    program gives a loss that is not finite and its operations one at a time give a finite one. Otherwise it is the
    verdict on the batch. If batch norm's running statistics are the cause, the advice says so.

    Args:
      run: the run.
      policy: the policy of the diagnosed evaluation.
      state: the evaluated state, unpacked; it is copied to one device.
      tolerance: the largest relative error of the batch's loss.
      search: whether to search for modules to keep in float32.
      progress: receives the progress of the diagnosis.
    """
    state = jax.device_get(run.block_by_block(state))  # on one device, whatever the mesh
    task, full = run.task_under(policy), run.task_under(get_policy("float32"))
    eval_step = _eval_step(task)
    sums = (eval_step(state.params, state.stats, batch) for batch in run.tests)
    bad = next((index for index, batch_sums in enumerate(sums) if not _is_finite(batch_sums)), None)
    batch = jax.device_put(next(itertools.islice(run.tests, bad or 0, None)))
    diagnosis = diagnose_evaluation(
        run.task_under, policy, state, batch, tolerance=tolerance, search=search, progress=progress
    )
    examined = f"Examined: the evaluation of batch {(bad or 0) + 1} of {len(run.tests)} of the test set."
    diagnosis = dataclasses.replace(diagnosis, evidence=f"{examined} {diagnosis.evidence}")
    if bad is not None and diagnosis.verdict == "healthy":
        reason = (
            "The compiled program gives a loss that is not finite, and its operations one at a time give a finite one"
        )
        advice = (
            f"jaxlib {version('jaxlib')}, or a library that it calls, computes this program wrongly on this device: "
            "try another version of jaxlib."
        )
        return diagnosis.beyond_dtypes(reason, f"{diagnosis.loss[0]:.3g}", [advice])
    loss = evaluate(_eval_step(full), state.params, state.stats, run.tests, full.objective.conclude)["loss"]
    lagging = _advice_on_statistics(task, state, batch) if bad is not None else ()
    if not math.isfinite(loss):
        reason = "The loss of the whole test set is not finite in float32 either"
        return diagnosis.beyond_dtypes(reason, f"with these parameters it is {loss:.3g}", lagging or [NO_DTYPE_REPAIRS])
    whole = f"With these parameters, the loss of the whole test set is {loss:.3g} in float32."
    return dataclasses.replace(
        diagnosis, evidence=f"{diagnosis.evidence} {whole}", advice=(*diagnosis.advice, *lagging)
    )


def _advice_on_statistics(task: Task, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[str, ...]:
    """Advises on batch norm, if a batch's loss is finite with its own statistics in place of the running ones.

    Otherwise, or without running statistics, the result is empty.
    """
    if not state.stats:
        return ()

    @jax.jit
    @task.cast
    def loss_in_training(params, stats, batch):
        model = task.structure.assemble(params, stats, jax.random.key(0))
        model.train()
        return mean_loss(task.objective, model, batch)

    loss = float(loss_in_training(state.params, state.stats, batch))
    if not math.isfinite(loss):
        return ()
    return (
        f"With its own statistics in place of the running ones, as in training, the loss of this batch is {loss:.3g}: "
        "the parameters change faster than the running statistics of batch norm follow. Lower the learning rate, at "
        "least towards the end (--optimizer.schedule cosine), or train for more steps.",
    )


def _eval_step(task: Task) -> Callable:
    return make_eval_step(task.structure, task.objective.measure, cast=task.cast)


def _is_finite(sums: Mapping[str, Any]) -> bool:
    """True if the sums of an evaluation step (total and weight) under `loss` are finite."""
    return all(np.isfinite(total) for total in jax.tree.leaves(jax.device_get(sums["loss"])))
