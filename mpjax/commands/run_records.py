"""The files that record the conditions of a run's steps: settings, history, environment and receipt."""

import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mpjax import report
from mpjax.commands.parts import ENVIRONMENT_FILE
from mpjax.config import Config
from mpjax.config.folders import run_settings
from mpjax.config.load import CONFIG_FILE
from mpjax.errors import CheckpointWarning
from mpjax.files import write_atomically
from mpjax.report.history import HISTORY_FILE, History


class Records:
    """Files that record the conditions of a run's steps.

    The files of a resumed run describe the earlier steps. They are replaced only after another step has run, however
    the process ends.

    Args:
      writing: whether this process writes the files of the run.
      waiting: whether the files wait for the first step.
    """

    def __init__(self, *, writing: bool = True, waiting: bool):
        self._writing, self._waiting = writing, waiting
        self._files: dict[pathlib.Path, bytes] = {}

    def put(self, file: pathlib.Path, content: bytes) -> None:
        """Writes a file, at once or after the first step."""
        if self._writing and self._waiting:
            self._files[file] = content
        elif self._writing:
            write_atomically(file, content)

    def written_after(self, train_call: Callable) -> Callable:
        """Wraps the training call to write the waiting files after the first call."""

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


def put_records(
    records: Records,
    config: Config,
    folder: pathlib.Path,
    start: int,
    about: Mapping[str, Any],
    before: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    compiler_options: Mapping[str, Any],
) -> History:
    """Puts history, settings and environment into the records of a run, and returns the history.

    Args:
      records: the files of the run.
      config: the settings of the next steps.
      folder: the folder of the run.
      start: the attempted steps so far.
      about: the description of the next checkpoints.
      before: the description of the checkpoint from which the run continues; empty for a new run.
      metrics: the lines of metrics.jsonl.
      compiler_options: XLA options.

    Warns:
      CheckpointWarning: metrics.jsonl has lost the lines of steps before the checkpoint.
    """
    if lost := report.missing_steps(metrics, start):
        said = "lacks the lines of steps {:,} to {:,}, which the run wrote before its checkpoint".format(*lost)
        text = f"{folder / 'metrics.jsonl'} {said}: summary and plots are of the other steps"
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    environment = report.environment([str(device.device_kind) for device in jax.devices()], compiler_options)
    history = report.continued(before, start, about, environment, lost)
    # The history first: labels derive from it, so they are right wherever the process is killed.
    records.put(folder / HISTORY_FILE, report.lines_of(history))
    records.put(folder / CONFIG_FILE, run_settings(config, folder).encode())
    records.put(folder / ENVIRONMENT_FILE, report.as_file(environment))
    return history
