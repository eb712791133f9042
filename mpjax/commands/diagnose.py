"""Diagnoses a step of a run: replays the run up to the step, diagnoses it, and writes the result.

With `--evaluation`, it diagnoses the evaluation of a checkpoint.
"""

import dataclasses
import math
import pathlib
import warnings
from collections.abc import Callable

import jax

from mpjax.commands.build import Run, build_run, fresh_state, read_whole, resumed_state, stored_encoding
from mpjax.commands.diagnose_evaluation import diagnosed_evaluation
from mpjax.commands.diagnosis_files import NO_DTYPE_REPAIRS, command_for, first_bad_layer, of_the_step_alone, write
from mpjax.commands.evaluate import require_same_outputs
from mpjax.commands.outside_files import compare_files
from mpjax.commands.run_folder import adopted
from mpjax.config.commands import Diagnose
from mpjax.config.folders import config_of_run, data_of_run, with_policy
from mpjax.config.schema import Config, Mesh
from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.fastest import Fastest
from mpjax.diagnosis.progress import progress_at
from mpjax.diagnosis.training import diagnose_step, fastest_of_step
from mpjax.errors import PrecisionWarning, UsageError, printable
from mpjax.loop.checkpoint import to_arrays
from mpjax.loop.resume import adopt
from mpjax.loop.signals import as_usual
from mpjax.loop.stored import CHECKPOINTS, complete_checkpoints, read_description
from mpjax.loop.train import Explain
from mpjax.models.devices import why_not_on
from mpjax.precision.presets import get_policy
from mpjax.report.history import HISTORY_FILE, later_turns, read_history
from mpjax.training.mesh import put_on_devices, resolve_sizes
from mpjax.training.setup import pretrained_arrays
from mpjax.training.state import TrainState


FURTHER = 20
"""Steps in float32 after which the loss has to be low again if precision alone broke the run (`in_view_of_float32`)."""


def diagnose_run(settings: Diagnose) -> Diagnosis | Fastest:
    """Diagnoses a step or an evaluation of a run, prints the verdict, and writes it to the run's folder.

    The files are `diagnosis_<step>.json` and `.html`, or `diagnosis_evaluation_<step>.json` and `.html`.

    Returns:
      The diagnosis. With `settings.search` "fastest", the fastest policy instead, which is only printed.

    Raises:
      UsageError: the run has no such step or checkpoint, there is no run, or a setting is invalid.

    Warns:
      PrecisionWarning: the step ran under other settings than those of config.toml, or on other devices; see
        `on_devices_here`.
    """
    settings.check()
    if settings.policy:
        get_policy(settings.policy)  # before any slow work
    folder = pathlib.Path(settings.run)
    config = on_devices_here(config_of_run(folder, trust_code=settings.trust_code))
    with data_of_run(folder):
        run = build_run(config, stored_encoding(config, folder))
    if settings.step > run.when.steps + 1:
        raise UsageError(f"--step {settings.step}: the run has {run.when.steps} steps")
    if settings.evaluation:
        title, name, result = _of_evaluation(settings, run, folder)
    else:
        title, name, result = _of_step(settings, run, folder)
    text = f"{title} of {folder}\n{result}"
    if isinstance(result, Diagnosis):
        text += f"\nsee {write(result, folder, name)}"
    print(result.to_json() if settings.json else printable(text))
    return result


def _of_step(settings: Diagnose, run: Run, folder: pathlib.Path) -> tuple[str, str, Diagnosis | Fastest]:
    """Diagnoses step `settings.step` (0: the step after the last checkpoint).

    Returns:
      The step in words, the word that ends the names of the diagnosis's files, and the result. The word is empty with
        `settings.search` "fastest", whose result is not written.

    Warns:
      PrecisionWarning: the step ran under other settings than those of config.toml.
    """
    number = settings.step or max(complete_checkpoints(folder / CHECKPOINTS), default=0) + 1
    if later := later_turns(read_history(folder / HISTORY_FILE), number):
        text = f"step {number} ran under other settings than those of config.toml, under which it is diagnosed: {later}"
        warnings.warn(text, PrecisionWarning, stacklevel=2)
    state, batch = replay(run, run.train_call, folder, number)
    title, single, seed, tolerance = f"step {number}", run.block_by_block(state), run.config.seed, settings.tolerance
    if settings.search == "fastest":
        return title, "", fastest_of_step(run.task_under, single, batch, seed=seed, tolerance=tolerance)
    with progress_at() as progress:
        diagnosis = diagnose_step(
            run.task_under,
            get_policy(settings.policy) if settings.policy else run.plan.policy,
            single,
            batch,
            seed=seed,
            loss_scale=settings.loss_scale or None,
            tolerance=tolerance,
            search=settings.search == "repair",
            progress=progress,
            tx=None if settings.policy else run.learner.tx,  # its state has the dtypes of the run's own policy
        )
    return title, str(number), in_view_of_float32(diagnosis, run, state, number)


def _of_evaluation(settings: Diagnose, run: Run, folder: pathlib.Path) -> tuple[str, str, Diagnosis]:
    """Diagnoses the evaluation of checkpoint `settings.step` (0: the latest); returns the same values as `_of_step`."""
    which = str(settings.step) if settings.step else "latest"
    position, saved, about = read_whole(run.task, run.config, run.source, run.layout, folder, which)
    require_same_outputs(folder, position, about, advice="leave out --step for the last one")
    state = resumed_state(run, lambda shapes: adopt(shapes, saved, same_scaling=False))
    policy = get_policy(settings.policy) if settings.policy else run.plan.policy
    with progress_at() as progress:
        diagnosis = diagnosed_evaluation(
            run,
            policy,
            state,
            tolerance=settings.tolerance,
            search=settings.search == "repair",
            progress=progress,
        )
    return f"evaluation after step {position}", f"evaluation_{position}", diagnosis


def on_devices_here(config: Config) -> Config:
    """Replaces the mesh of a run by the default one, and its norm kernel by XLA's, if the present devices lack support.

    Otherwise the settings stay as they are.

    Warns:
      PrecisionWarning: a setting was replaced. Dropout and batch norm statistics then differ from the run's, because
        they depend on the examples of each device, or the gradients of norms are rounded otherwise.
    """
    try:
        resolve_sizes(config.mesh.sizes, jax.device_count())
    except UsageError:
        sizes = ", ".join(f"{name} {size}" for name, size in config.mesh.sizes.items())
        text = (
            f"the run's mesh ({sizes}) does not fit the devices here ({jax.device_count()}): its step is replayed on a "
            "mesh of these, with other random numbers in dropout"
        )
        if config.training.batch_norm == "device":
            text += " and batch norms that see more or fewer examples"
        warnings.warn(text, PrecisionWarning, stacklevel=2)
        config = dataclasses.replace(config, mesh=Mesh())
    if config.model.norm_kernel != "xla" and (reason := why_not_on(jax.devices()[0])):
        text = (
            f"--model.norm_kernel {config.model.norm_kernel} {reason}: the step is replayed with XLA's kernels for "
            "norms, which round the two terms of a gradient before they are added"
        )
        warnings.warn(text, PrecisionWarning, stacklevel=2)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, norm_kernel="xla"))
    return config


def explain_now(run: Run, train_call: Callable, folder: pathlib.Path) -> Explain:
    """Builds the functions that diagnose a run after it has diverged, in the same process.

    Each writes the JSON and the HTML of its diagnosis to the run's folder, and returns a text for the user.
    `train_call` is the compiled training call, which replays the run. While a function works, SIGINT raises
    KeyboardInterrupt and SIGTERM ends the process.
    """
    config, search = run.config, run.config.diagnosis.search

    @as_usual()  # a diagnosis may take minutes
    def step(number: int) -> str:
        state, batch = replay(run, train_call, folder, number)
        seed, single = config.seed, run.block_by_block(state)
        policy, tx = run.plan.policy, run.learner.tx
        diagnosis = diagnose_step(run.task_under, policy, single, batch, seed=seed, search=search, tx=tx)
        diagnosis = in_view_of_float32(diagnosis, run, state, number, diverged=True)
        page = write(diagnosis, folder, str(number))
        return f"{first_bad_layer(diagnosis)}{diagnosis}\nsee {page}, and again: {command_for(folder, number)}"

    @as_usual()
    def evaluation(position: int, packed: TrainState) -> str:
        diagnosis = diagnosed_evaluation(run, run.plan.policy, run.packing.unpack(packed), search=search)
        page = write(diagnosis, folder, f"evaluation_{position}")
        again = command_for(folder, position, "--evaluation")
        return f"{first_bad_layer(diagnosis)}{diagnosis}\nsee {page}, and again: {again}"

    return Explain(step, evaluation)


def explain_later(folder: pathlib.Path) -> Explain:
    """Builds functions that only return a line with the command that diagnoses the run afterwards.

    They are for runs of several processes, because a diagnosis runs in one process.
    """
    text = "to find the first bad layer: "
    return Explain(
        lambda number: text + command_for(folder, number),
        lambda position, _: text + command_for(folder, position, "--evaluation"),
    )


def replay(run: Run, train_call: Callable, folder: pathlib.Path, number: int):
    """Replays a run up to step `number`, counted from 1; returns the state before that step, and the step's batch.

    The replay begins with the last checkpoint before the step; without such a checkpoint, with the initial state,
    pretrained weights included. The returned state is unpacked, and the batch is on the devices. The replay makes the
    calls that the run made, with `train_call`. If step `number` is inside a call of several steps, the earlier steps of
    that call run one at a time.
    """
    positions = list(complete_checkpoints(folder / CHECKPOINTS))
    if earlier := [position for position in positions if position < number]:
        start, saved, about = read_whole(run.task, run.config, run.source, run.layout, folder, str(earlier[-1]))
        state = resumed_state(run, lambda shapes: adopted(shapes, saved, about, run))
    else:
        start, state = 0, fresh_state(run, pretrained_arrays(run.task, run.config.model)[0])
        if positions and (about := read_description(folder / CHECKPOINTS, str(positions[0]))):
            compare_files(run.config, run.source, folder, about)
    counts, position = [], start
    for count in run.when.call_counts(start):
        if position + count >= number:
            break
        counts.append(count)
        position += count
    state = run.packing.pack(state)
    for count, fed in zip(counts, run.feed.calls(start, counts), strict=True):
        state, _ = train_call(state, fed, count)
    stream = (put_on_devices(batch, run.batch_sharding) for batch in run.batches.from_position(position))
    for _ in range(position + 1, number):
        state, _ = run.train_step(state, next(stream))
    return run.packing.unpack(state), next(stream)


def in_view_of_float32(
    diagnosis: Diagnosis, run: Run, state: TrainState, number: int, *, diverged: bool = False
) -> Diagnosis:
    """Returns `diagnosis`, with the verdict "not_precision" if the run does not recover in float32 from the same state.

    `state` is the unpacked state before step `number`. It trains `FURTHER` steps in float32, from the batch of that
    step on. The run recovers if the loss of the last step is finite and below twice the loss of the untrained model on
    the batch of step `number`. The verdict "not_precision" stays without training; so does "healthy", unless the run
    `diverged` at the step: a gradient may be finite while its norm is not.
    """
    if diagnosis.verdict == "not_precision" or (diagnosis.verdict == "healthy" and not diverged):
        return diagnosis
    run = build_run(with_policy(run.config, "float32", rules={}), run.source.encoding)
    stream = (put_on_devices(batch, run.batch_sharding) for batch in run.batches.from_position(number - 1))
    first = next(stream)
    _, untrained = run.train_step(run.packing.pack(fresh_state(run)), first)
    saved = jax.device_get(to_arrays(state))
    state = resumed_state(run, lambda shapes: adopt(shapes, saved, same_scaling=False))
    state = run.packing.pack(state)
    batch, metrics = first, untrained
    for _ in range(FURTHER):
        state, metrics = run.train_step(state, batch)
        batch = next(stream)
    loss, before = float(metrics["loss"]), float(untrained["loss"])
    if math.isfinite(loss) and loss < 2 * before:
        return diagnosis
    return diagnosis.beyond_dtypes(
        "The run does not recover in float32 either",
        f"{FURTHER} steps from here the loss is {loss:.3g}, and the untrained model's is {before:.3g}",
        [NO_DTYPE_REPAIRS, *of_the_step_alone(diagnosis)],
    )
