"""What a run leaves behind: console, files, plots."""

from mpjax.report.compose import open_writers
from mpjax.report.environment import write_environment
from mpjax.report.jsonl import read_metrics
from mpjax.report.plot import plot_curves
from mpjax.report.summary import summarise, summary_table, throughput, write_summary
from mpjax.report.writer import Writer, Writers


__all__ = [
    "Writer",
    "Writers",
    "open_writers",
    "plot_curves",
    "read_metrics",
    "summarise",
    "summary_table",
    "throughput",
    "write_environment",
    "write_summary",
]
