"""Diagnoses a step of a run: replays the run up to the step, diagnoses it, and writes the result."""

import dataclasses
import math
import pathlib
import warnings
from collections.abc import Callable

import jax

from mpjax.commands.parts import CHECKPOINTS, Parts, fresh_state, make_parts, resumed_state
from mpjax.config import Config
from mpjax.config.commands import Diagnose
from mpjax.config.folders import config_of_run, with_policy
from mpjax.config.program import command_line
from mpjax.config.schema import Mesh
from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.fastest import Fastest
from mpjax.diagnosis.progress import progress_at
from mpjax.diagnosis.training import diagnose_step, fastest_of_step
from mpjax.errors import PrecisionWarning, UsageError
from mpjax.loop.checkpoint import to_arrays
from mpjax.loop.process import as_usual
from mpjax.loop.resume import adopt
from mpjax.loop.stored import complete_checkpoints, read_checkpoint
from mpjax.precision.policy import get_policy
from mpjax.report import read_metrics
from mpjax.training import TrainState
from mpjax.training.mesh import place, settle
from mpjax.training.setup import pretrained_arrays


FURTHER = 20
"""Steps in float32 after which a run that only precision broke is below the loss of an untrained model again."""


def diagnose_run(settings: Diagnose) -> Diagnosis | Fastest:
    """Diagnoses a step of a run, prints the verdict and writes it into the run's folder.

    Returns:
      The diagnosis; with `search` "fastest" the fastest policy, and no file is written.

    Raises:
      UsageError: there is no run or no such step, or the policy is invalid.
    """
    folder = pathlib.Path(settings.run)
    config = on_devices_here(config_of_run(folder, trust_code=settings.trust_code))
    parts = make_parts(config)
    if settings.loss_scale < 0:
        raise UsageError(f"--loss_scale {settings.loss_scale:g}: wanted a positive number, or 0 for the run's own")
    number = settings.step or max(complete_checkpoints(folder / CHECKPOINTS), default=0) + 1
    if number > parts.when.steps + 1:
        raise UsageError(f"--step {number}: the run has {parts.when.steps} steps")
    if number < 1:
        raise UsageError(f"--step {number}: wanted a step from 1 on, or 0 for the one after the last checkpoint")

    state, batch = replay(config, parts, parts.train_call, folder, number)
    if settings.search == "fastest":
        single = parts.block_by_block(state)
        fastest = fastest_of_step(parts.task_under, single, batch, seed=config.seed, tolerance=settings.tolerance)
        print(fastest.to_json() if settings.json else f"step {number} of {folder}\n{fastest}")
        return fastest
    with progress_at() as progress:
        found = diagnose_step(
            parts.task_under,
            get_policy(settings.policy) if settings.policy else parts.plan.policy,
            parts.block_by_block(state),
            batch,
            seed=config.seed,
            loss_scale=settings.loss_scale or None,
            tolerance=settings.tolerance,
            search=settings.search == "repair",
            progress=progress,
            tx=None if settings.policy else parts.tx,  # whose state has the dtypes of the run's own policy
        )
    found = in_view_of_float32(found, config, state, number)
    page = write(found, folder, number)
    print(found.to_json() if settings.json else f"step {number} of {folder}\n{found}\nsee {page}")
    return found


def on_devices_here(config: Config) -> Config:
    """Returns the settings of a run with a mesh of the devices that are here, if the run's own does not fit them.

    Warns:
      PrecisionWarning: it does not fit, so the step that is replayed differs where a device's share of a batch matters.
    """
    try:
        settle(config.mesh.sizes, jax.device_count())
    except UsageError:
        sizes = ", ".join(f"{name} {size}" for name, size in config.mesh.sizes.items())
        text = (
            f"the run's mesh ({sizes}) does not fit the devices here ({jax.device_count()}): its step is replayed on a "
            "mesh of these, with other random numbers in dropout"
        )
        if config.training.batch_norm == "device":
            text += " and batch norms that see more or fewer examples"
        warnings.warn(text, PrecisionWarning, stacklevel=2)
        return dataclasses.replace(config, mesh=Mesh())
    return config


@as_usual()  # it may take minutes
def explain(config: Config, parts: Parts, train_call: Callable, folder: pathlib.Path, number: int) -> str:
    """Diagnoses a step after which training cannot continue; writes the result to the run's folder."""
    state, batch = replay(config, parts, train_call, folder, number)
    search, seed, single = config.diagnosis.search, config.seed, parts.block_by_block(state)
    found = diagnose_step(parts.task_under, parts.plan.policy, single, batch, seed=seed, search=search, tx=parts.tx)
    found = in_view_of_float32(found, config, state, number, diverged=True)
    page = write(found, folder, number)
    return f"{_first_bad_layer(found)}{found}\nsee {page}, and again: {command_for(folder, number)}"


def command_for(folder: pathlib.Path, number: int) -> str:
    """Returns the command that diagnoses a step of a run."""
    return command_line("diagnose", "--run", str(folder), "--step", str(number))


def _first_bad_layer(found: Diagnosis) -> str:
    """Returns one line. If the fault begins between modules, it names the first module after it."""
    if found.direction is None:
        return ""
    rows = [row for row in found.table if row.direction == found.direction and row.path]
    after = [row.path for row in rows if row.non_finite or row.overflow]
    path = found.path or next(iter(after), "none by name")
    return f"first bad layer: {path} ({found.direction})\n"


def write(found: Diagnosis, folder: pathlib.Path, number: int) -> pathlib.Path:
    """Writes `diagnosis_<step>.json` and the page beside it; returns the path of the page."""
    found.to_json(folder / f"diagnosis_{number}.json")
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    scales = [(r["step"], r["train/loss_scale"], r["train/skipped"]) for r in records if "train/loss_scale" in r]
    page = folder / f"diagnosis_{number}.html"
    found.to_html(page, scales=scales)
    return page


def replay(config: Config, parts: Parts, train_call: Callable, folder: pathlib.Path, number: int):
    """Returns the state before step `number` and that step's batch, replayed from the last checkpoint before it.

    The replay uses the run's own calls; steps of the last call that come before the step run one at a time.
    """
    earlier = [position for position in complete_checkpoints(folder / CHECKPOINTS) if position < number]
    if earlier:
        start, saved, about = read_checkpoint(folder / CHECKPOINTS, str(earlier[-1]))
        same = about["loss_scale"] == str(parts.plan.loss_scale)
        state = resumed_state(config, parts, lambda shapes: adopt(shapes, saved, same_scaling=same))
    else:
        start, state = 0, fresh_state(config, parts, pretrained_arrays(parts.task, config.model)[0])
    counts, position = [], start
    for count in parts.when.call_counts(start):
        if position + count >= number:
            break
        counts.append(count)
        position += count
    state = parts.packing.pack(state)
    for count, fed in zip(counts, parts.feed.calls(start, counts), strict=True):
        state, _ = train_call(state, fed, count)
    stream = (place(batch, parts.split) for batch in parts.batches.from_position(position))
    for _ in range(position + 1, number):
        state, _ = parts.train_step(state, next(stream))
    return parts.packing.unpack(state), next(stream)


def in_view_of_float32(
    found: Diagnosis, config: Config, state: TrainState, number: int, *, diverged: bool = False
) -> Diagnosis:
    """Changes the verdict to "not_precision" if the run does not recover in float32 from the same state.

    A run recovers if its loss, some steps later, is below twice that of the untrained model. A healthy step is checked
    only if the run `diverged` there: a gradient may be finite while its norm is not.
    """
    if found.verdict == "not_precision" or (found.verdict == "healthy" and not diverged):
        return found
    parts = make_parts(with_policy(config, "float32", rules={}))
    stream = (place(batch, parts.split) for batch in parts.batches.from_position(number - 1))
    first = next(stream)
    _, untrained = parts.train_step(parts.packing.pack(fresh_state(config, parts)), first)
    saved = jax.device_get(to_arrays(state))
    state = resumed_state(config, parts, lambda shapes: adopt(shapes, saved, same_scaling=False))
    state = parts.packing.pack(state)
    batch, metrics = first, untrained
    for _ in range(FURTHER):
        state, metrics = parts.train_step(state, batch)
        batch = next(stream)
    loss, before = float(metrics["loss"]), float(untrained["loss"])
    if math.isfinite(loss) and loss < 2 * before:
        return found
    return dataclasses.replace(
        found,
        verdict="not_precision",
        evidence=f"{found.evidence} But the run does not recover in float32 either: {FURTHER} steps from here the loss "
        f"is {loss:.3g}, and the untrained model's is {before:.3g}.",
        rules={},
        better_scale=None,
        verified=False,
        float32_flops=0.0,
        advice=("Look at the learning rate, the data and the parameters: no choice of dtypes repairs this.",),
    )
