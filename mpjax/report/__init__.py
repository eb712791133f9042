"""Writes the results of a run: console output, files and plots."""

import contextlib
import os
from pathlib import Path

from mpjax.files import write_atomically
from mpjax.report.console import console_writer
from mpjax.report.figure import image_files
from mpjax.report.history import continued, entries_of, lines_of, other_versions, policies_of
from mpjax.report.jsonl import jsonl_writer, missing_steps, read_metrics
from mpjax.report.plot import plot_curves
from mpjax.report.rate_plot import plot_rates
from mpjax.report.results import (
    as_file,
    environment,
    process_of,
    summarise,
    summary_of,
    summary_table,
    throughput,
    write_summary,
)
from mpjax.report.seeds_plot import plot_seeds
from mpjax.report.tensorboard import tensorboard_writer
from mpjax.report.wording import subject_of, title_of
from mpjax.report.writer import Writer, Writers


__all__ = [
    "Writer",
    "Writers",
    "as_file",
    "continued",
    "entries_of",
    "environment",
    "image_files",
    "lines_of",
    "missing_steps",
    "open_writers",
    "other_versions",
    "plot_curves",
    "plot_rates",
    "plot_seeds",
    "policies_of",
    "process_of",
    "read_metrics",
    "subject_of",
    "summarise",
    "summary_of",
    "summary_table",
    "throughput",
    "title_of",
    "write_atomically",
    "write_summary",
]


def open_writers(
    run_dir: str | os.PathLike[str], total_steps: int, resume_step: int | None = None, *, tensorboard: bool = True
) -> Writers:
    """Opens metrics.jsonl, optional TensorBoard events and the console. If no step is left, opens only the console.

    Args:
      run_dir: the run's folder; events go to its subfolder `tensorboard`.
      total_steps: the number of attempted steps at which the run ends.
      resume_step: the step of the checkpoint that the run resumes from. None: a new run.
      tensorboard: True to write TensorBoard events.

    Raises:
      UsageError: a new run would overwrite the metrics of an earlier run.
      OSError: a file cannot be written; the message names the file.
    """
    folder = Path(run_dir)
    if resume_step is not None and resume_step >= total_steps:
        return Writers([console_writer(total_steps, start_step=resume_step)])
    with contextlib.ExitStack() as opened:
        writers = [jsonl_writer(folder / "metrics.jsonl", resume_step)]
        opened.callback(writers[-1].close)
        if tensorboard:
            writers.append(tensorboard_writer(folder / "tensorboard", resume_step))
            opened.callback(writers[-1].close)
        # The console is last, so that an error above leaves no live display on the terminal.
        writers.append(console_writer(total_steps, start_step=resume_step or 0))
        opened.pop_all()
    return Writers(writers)
