"""Writes the results of a run: console output, files and plots."""

from mpjax.extend import Writer
from mpjax.report.curves import plot_curves, plot_seeds
from mpjax.report.figure import image_files
from mpjax.report.history import continued, entries_of, lines_of, other_versions, policies_of
from mpjax.report.jsonl import missing_steps, read_metrics, written_lines
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
from mpjax.report.wording import subject_of, title_of
from mpjax.report.writer import Writers, open_writers


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
    "write_summary",
    "written_lines",
]
