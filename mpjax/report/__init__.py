"""What a run leaves behind: console, files, plots."""

from mpjax.report.compose import open_writers
from mpjax.report.environment import process_of, write_environment
from mpjax.report.files import write_atomically
from mpjax.report.jsonl import read_metrics
from mpjax.report.plot import plot_curves
from mpjax.report.summary import summarise, summary_table, throughput, write_summary
from mpjax.report.writer import Writer, Writers


__all__ = [
    "Writer",
    "Writers",
    "open_writers",
    "plot_curves",
    "process_of",
    "read_metrics",
    "summarise",
    "summary_table",
    "throughput",
    "write_atomically",
    "write_environment",
    "write_summary",
]
