"""Shows the comparison of two groups of runs: a table, sentences of evidence, and a plot."""

import io
import os
from collections.abc import Sequence
from pathlib import Path

from mpjax.report.comparison import Comparison, Contrast, Group
from mpjax.report.files import write_atomically
from mpjax.report.wording import count, number


def comparison_table(names: tuple[str, str], comparisons: Sequence[Comparison]):
    """Returns a rich table with a line for the last value of each metric, and one for its best value if it has one.

    Args:
      names: the names of the reference and of the other group, for the column headers.
      comparisons: the comparisons of the two groups, one for each metric.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("metric", no_wrap=True)
    for head in (*names, f"{names[1]} - {names[0]}", "bands", "parts at"):
        table.add_column(head, justify="right", overflow="fold")
    for found in comparisons:
        parts = "never" if found.parts_at is None else f"step {found.parts_at}"
        parts = "by design" if found.by_design else parts
        table.add_row(*_cells(found.metric, found.metric, found.final), parts)
        if found.best is not None:
            table.add_row(*_cells("  best", found.metric, found.best), "")
    return table


def evidence(
    reference: Group, other: Group, comparisons: Sequence[Comparison], *, band: str, tolerance: float
) -> list[str]:
    """Describes in sentences how two groups were compared and the result for each metric."""
    runs = len(reference.runs), len(other.runs)
    if runs == (1, 1):
        says = [
            f"one run each: how far seeds alone take such curves apart is not known, and a difference counts from "
            f"{tolerance:.3g} of the value; runs of two or more seeds each would tell"
        ]
    else:
        spread = (
            "from the lowest to the highest seed" if band == "range" else "of two standard deviations over the seeds"
        )
        says = [f"{runs[0]} and {runs[1]} runs: a difference counts where the bands {spread} do not touch"]
        if 1 in runs:
            says[0] += "; of a single run the band is a line"
    for found in comparisons:
        points = len(found.steps)
        if found.by_design:
            says.append(f"{found.metric}: one policy scales the loss and the other does not; no difference to judge")
        elif found.parts_at is None:
            says.append(f"{found.metric}: together at the last of {points} points, step {found.steps[-1]}")
        else:
            says.append(
                f"{found.metric} parts at step {found.parts_at} and stays apart, {found.apart} of {points} points"
            )
    return says


def _cells(label: str, metric: str, found: Contrast) -> list[str]:
    text = count if metric == "train/loss_scale" else number
    bands = [text(b.center) + (f"±{text(b.half)}" if b.half > 0 else "") for b in (found.reference, found.other)]
    return [label, *bands, f"{found.difference:+.3g}", f"{abs(found.bands):.2f}"]


_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def plot_comparison(
    names: Sequence[str], comparisons: Sequence[Sequence[Comparison]], path: str | os.PathLike[str]
) -> None:
    """Draws a panel for each metric: every group's center and band, and a line where it parts from the first group.

    Args:
      names: the names of the groups, the reference first.
      comparisons: the comparisons of each other group with the reference, one for each metric.
      path: the image file; its extension selects the format.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    metrics = list(zip(*comparisons, strict=True))
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    size = (8, 0.9 + 0.22 * len(names) + 2.2 * len(metrics))
    figure = Figure(figsize=size, dpi=150, layout=layout, facecolor="white")
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for panel, of_metric in zip(panels, metrics, strict=True):
        _draw(panel, of_metric)
    panels[-1].set_xlabel("step (attempted)")
    handles = panels[0].get_lines()[: len(names)]
    figure.legend(handles, names, loc="outside upper left", frameon=False, fontsize=9)
    image = io.BytesIO()
    figure.savefig(image, format=Path(path).suffix.lstrip(".") or "png")
    write_atomically(Path(path), image.getvalue())


def _draw(panel, of_metric: Sequence[Comparison]) -> None:
    from matplotlib.ticker import MaxNLocator

    first = of_metric[0]
    bands = [(first.steps, first.reference), *((found.steps, found.other) for found in of_metric)]
    for i, (steps, band) in enumerate(bands):
        color = _COLORS[i % len(_COLORS)]
        dot = "o" if len(steps) < 15 else ""
        panel.plot(steps, band.center, color=color, linewidth=1.5, marker=dot, markersize=3.5, zorder=3)
        panel.fill_between(steps, band.center - band.half, band.center + band.half, color=color, alpha=0.2, linewidth=0)
    parted = [(i, found.parts_at) for i, found in enumerate(of_metric, start=1) if found.parts_at is not None]
    for i, step in parted:
        panel.axvline(step, color=_COLORS[i % len(_COLORS)], linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
    told = ", ".join(f"{letter(i)} parts at step {step:,}" for i, step in parted) or "no parting"
    panel.set_title(first.metric, loc="left", fontsize=11)
    panel.set_title(told, loc="right", fontsize=9, color="#4D4D4D")
    if first.metric == "train/loss_scale":
        panel.set_yscale("log", base=2)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9, colors="#4D4D4D")
    panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def letter(index: int) -> str:
    """Returns the short name of a group: A, B, ... Z, 27, 28, ..."""
    return chr(ord("A") + index) if index < 26 else str(index + 1)
