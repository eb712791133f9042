"""Writes the files of a run besides metrics: the conditions of its steps (settings, versions, ...) and its results."""

import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpjax.commands.build import ENVIRONMENT_FILE, Run
from mpjax.commands.run_folder import Beginning
from mpjax.config.folders import run_settings
from mpjax.config.load import CONFIG_FILE, from_toml
from mpjax.config.score import score_of
from mpjax.errors import CheckpointWarning
from mpjax.files import write_atomically
from mpjax.precision.scale_state import loss_scale_state
from mpjax.report.curves import plot_curves
from mpjax.report.figure import image_files
from mpjax.report.history import HISTORY_FILE, History, continued, entries_of, lines_of, policies_of
from mpjax.report.jsonl import missing_steps, read_metrics
from mpjax.report.results import as_file, environment, summarise, summary_of, throughput, write_summary
from mpjax.report.wording import title_of
from mpjax.training.state import TrainState


class Records:
    """Writes the files that record the conditions of a run's steps, such as config.toml: at once or after a first step.

    The files of a resumed run describe the earlier steps. They are replaced only after another step has run, however
    the process ends.

    Args:
      writing: whether this process writes the files of the run; otherwise nothing is written.
      waiting: whether files are kept in memory until the first step, as in a resumed run.
    """

    def __init__(self, *, writing: bool = True, waiting: bool):
        self._writing, self._waiting = writing, waiting
        self._files: dict[pathlib.Path, bytes] = {}

    def put(self, file: pathlib.Path, content: bytes) -> None:
        """Writes a file atomically: at once, or after the first step if files wait; then its last content counts."""
        if self._writing and self._waiting:
            self._files[file] = content
        elif self._writing:
            write_atomically(file, content)

    def written_after(self, train_call: Callable) -> Callable:
        """Wraps the training call to write the waiting files once its first call has finished on the device.

        `train_call` is `(state, fed, count) -> (state, metrics)`, and so is the result. Only a call after which files
        wait blocks on its metrics.
        """

        def call(state, fed, count: int):
            state, metrics = train_call(state, fed, count)
            if self._files:
                jax.block_until_ready(metrics)
            while self._files:
                file = next(iter(self._files))
                write_atomically(file, self._files[file])
                del self._files[file]
            return state, metrics

        return call


def put_records(records: Records, run: Run, folder: pathlib.Path, beginning: Beginning) -> History:
    """Puts history.jsonl, config.toml and environment.json into `records`, and returns the history with a new line.

    The new line describes the steps that this command will run.

    Warns:
      CheckpointWarning: metrics.jsonl has lost lines of steps before the checkpoint.
    """
    written = beginning.before.get("metrics_lines", 0)
    if lost := missing_steps(beginning.metrics, beginning.step, written):
        missing = written - sum(record["step"] <= beginning.step for record in beginning.metrics)
        lines = f"{missing:,} of the {written:,} lines" if missing > 0 else "lines"
        steps = "of steps {:,} to {:,}".format(*lost)
        text = f"{folder / 'metrics.jsonl'} lacks {lines} that the run wrote before its checkpoint, {steps}"
        text += ": summary and plots are of the other lines"
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    described = environment([str(device.device_kind) for device in jax.devices()], run.compiler_options)
    history = continued(beginning.before, beginning.step, beginning.about, described, lost, beginning.best_anew)
    # The history first: labels derive from it, so they are right wherever the process is killed.
    records.put(folder / HISTORY_FILE, lines_of(history))
    records.put(folder / CONFIG_FILE, run_settings(run.config, folder).encode())
    records.put(folder / ENVIRONMENT_FILE, as_file(described))
    if run.config.is_encoded:
        from mpjax.commands.encoding_of_run import ENCODING_FILE, encoded_as  # local, as few runs have statistics

        records.put(folder / ENCODING_FILE, encoded_as(run.source.encoding))
    return history


def put_results(
    run: Run,
    folder: pathlib.Path,
    state: TrainState,
    history: History,
    spent: Mapping[str, float],
    *,
    best_step: int | None,
    ran: bool,
) -> dict[str, Any]:
    """Writes summary.json and the plots of the curves of a run, and returns the summary.

    Args:
      run: the run.
      folder: its folder.
      state: its last state, which may be packed.
      history: its history, with the line of this command.
      spent: entries of the summary in seconds, by name, such as `seconds` and `compile_seconds`.
      best_step: the step of the best checkpoint; None if there is none.
      ran: whether this command ran a step. If not, the results belong to the stored settings of the earlier steps, and
        a summary.json that agrees with them is returned without writing anything.
    """
    config, file = run.config, folder / "summary.json"
    if not ran:
        config, history = from_toml(folder / CONFIG_FILE), history[:-1]
    ended = {
        "steps": int(state.step),
        "attempts": int(state.attempts),
        "policy": policies_of(history, str(run.plan.policy)),
        **entries_of(history),
    }
    if not ran and (summary := summary_of(file, ended)):
        return summary
    parameters = sum(p.size for p in state.params.values())
    if config.training.lora:
        from mpjax.commands.base_weights import parameters_of  # local, as few runs have adapters

        parameters = parameters_of(run.task)
    metrics = folder / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    summary = summarise(
        lines,
        score=score_of(config),
        best_step=best_step,
        skipped=int(loss_scale_state(state.opt_state).skipped),
        **spent,
        examples_per_second=throughput(lines),
        parameters=parameters,
        output_dir=str(folder),
        **ended,
    )
    write_summary(file, summary)
    for image in image_files(folder / "curves", config.report):
        plot_curves(lines, image, title_of(config, history), history)
    return summary
