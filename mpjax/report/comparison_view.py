"""Shows the comparison of two groups of runs: a table, sentences of evidence, and a plot."""

import math
import os
from collections.abc import Sequence

from mpjax.report.comparison import Comparison, Contrast, Group
from mpjax.report.figure import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    draw_band,
    new_figure,
    save_figure,
    step_panels,
)
from mpjax.report.wording import count, number


def comparison_table(names: tuple[str, str], comparisons: Sequence[Comparison]):
    """Builds a rich table with a row for the last value of each metric, and a row for its best value, if any.

    Args:
      names: the names of the reference and of the other group, for the column headers.
      comparisons: the comparisons of the two groups, one for each metric.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("metric", no_wrap=True)
    for head in (*names, f"{names[1]} - {names[0]}", "bands", "parts at"):
        table.add_column(head, justify="right", overflow="fold")
    for comparison in comparisons:
        parting = "never" if comparison.parts_at is None else f"step {comparison.parts_at}"
        parting = "not finite" if _is_nowhere_finite(comparison.final) else parting
        parting = "by design" if comparison.by_design else parting
        table.add_row(*_cells(comparison.metric, comparison.metric, comparison.final), parting)
        if comparison.best is not None:
            table.add_row(*_cells("  best", comparison.metric, comparison.best), "")
    return table


def evidence(
    reference: Group, other: Group, comparisons: Sequence[Comparison], *, band: str, tolerance: float
) -> list[str]:
    """Describes how two groups are compared, in one sentence, and the result for each metric, in a sentence each.

    `band` and `tolerance` are as in `compare_groups`.
    """
    runs = len(reference.runs), len(other.runs)
    if runs == (1, 1):
        sentences = [
            f"one run each: how far seeds alone take such curves apart is not known, and a difference counts from "
            f"{tolerance:.3g} of the value; runs of two or more seeds each would tell"
        ]
    else:
        spread = (
            "from the lowest to the highest seed" if band == "range" else "of two standard deviations over the seeds"
        )
        sentences = [f"{runs[0]} and {runs[1]} runs: a difference counts where the bands {spread} do not touch"]
        if 1 in runs:
            sentences[0] += "; of a single run the band is a line"
        sentences[0] += "; shown are mean ± standard deviation"
    for comparison in comparisons:
        points = len(comparison.steps)
        if comparison.by_design:
            sentences.append(
                f"{comparison.metric}: one policy scales the loss and the other does not; no difference to judge"
            )
        elif _is_nowhere_finite(comparison.final):
            sentences.append(
                f"{comparison.metric}: not finite in some run of each group at the last of {points} points, step "
                f"{comparison.steps[-1]}; no difference to judge"
            )
        elif comparison.parts_at is None:
            sentences.append(
                f"{comparison.metric}: together at the last of {points} points, step {comparison.steps[-1]}"
            )
        else:
            sentences.append(
                f"{comparison.metric} parts at step {comparison.parts_at} and stays apart, "
                f"{comparison.apart} of {points} points"
            )
        sentences[-1] += _averaged(comparison)
    return sentences


def _cells(label: str, metric: str, contrast: Contrast) -> list[str]:
    """Formats a row of the table: label, both groups, their difference, and the magnitude of `Contrast.bands`."""
    text = count if metric == "train/loss_scale" else number
    spread = [f"±{text(seeds.std)}" if seeds.std and math.isfinite(seeds.std) else "" for seeds in contrast.seeds]
    groups = [text(seeds.mean) + std for seeds, std in zip(contrast.seeds, spread, strict=True)]
    bands = "-" if _is_nowhere_finite(contrast) else f"{abs(contrast.bands):.2f}"
    return [label, *groups, f"{contrast.difference:+.3g}", bands]


def _is_nowhere_finite(contrast: Contrast) -> bool:
    """True if each of the two groups has a run that is not finite."""
    return math.isnan(contrast.reference.center) and math.isnan(contrast.other.center)


def _averaged(comparison: Comparison) -> str:
    """A clause that tells the length of the moving average; empty without one."""
    return f", each the mean of up to {comparison.window} values" if comparison.window > 1 else ""


_COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)

_BANDS = {
    "range": "Band: from the lowest to the highest seed. Line: its middle.",
    "std": "Band: two standard deviations over the seeds, to each side. Line: their mean.",
}


def plot_comparison(
    names: Sequence[str],
    comparisons: Sequence[Sequence[Comparison]],
    path: str | os.PathLike[str],
    title: str = "",
    *,
    band: str = "range",
) -> None:
    """Draws a panel for each metric, with the center and band of every group, and writes the figure to a file.

    A dashed line marks the step from which a group stays apart from the first group (`Comparison.parts_at`).

    Args:
      names: the names of the groups, the reference first.
      comparisons: the comparisons of each other group with the reference, one for each metric.
      path: the image file; its extension selects the format.
      title: the title above the panels.
      band: the kind of the bands, as in `compare_groups`.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    metrics = list(zip(*comparisons, strict=True))
    figure = new_figure(8, 0.9 + 0.22 * len(names) + 2.2 * len(metrics), note=_note(comparisons, band))
    panels = step_panels(figure, [1.0] * len(metrics))
    for panel, of_metric in zip(panels, metrics, strict=True):
        _draw(panel, of_metric)
    handles = panels[0].get_lines()[: len(names)]
    legend = figure.legend(handles, names, loc="outside upper left", frameon=False, fontsize=9, alignment="left")
    if title:  # a title of the figure would overlap the legend
        legend.set_title(title, prop={"size": 13, "weight": "bold"})
    save_figure(figure, path)


def _note(comparisons: Sequence[Sequence[Comparison]], band: str) -> str:
    """Writes the note of the figure: what a band shows, or that there is none because each group is one run.

    If only some groups are one run, the note adds that these have no band. `band` is as in `compare_groups`.
    """
    alone = [seeds.std is None for of_group in comparisons for seeds in of_group[0].final.seeds]
    if all(alone):
        return "One run of each: how far seeds alone take them apart is not known, so there is no band."
    return _BANDS[band] + (" A group of one run has no band." if any(alone) else "")


def _draw(panel, of_metric: Sequence[Comparison]) -> None:
    """Draws the panel of one metric: a curve and a band for each group, and lines at `parts_at`."""
    first = of_metric[0]
    bands = [(first.steps, first.reference), *((comparison.steps, comparison.other) for comparison in of_metric)]
    for i, (steps, band) in enumerate(bands):
        color = _COLORS[i % len(_COLORS)]
        dot = "o" if len(steps) < 15 else ""
        # The first curve is thickest, so that equal curves show on both sides of the next.
        width = 1.5 + 1.5 * (len(bands) - 1 - i) / max(len(bands) - 1, 1)
        panel.plot(steps, band.center, color=color, linewidth=width, marker=dot, markersize=2 + width, zorder=3)
        draw_band(panel, steps, band.center - band.half, band.center + band.half, color=color, alpha=0.2)
    parted = [
        (i, comparison.parts_at) for i, comparison in enumerate(of_metric, start=1) if comparison.parts_at is not None
    ]
    for i, step in parted:
        panel.axvline(step, color=_COLORS[i % len(_COLORS)], linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
    parting = ", ".join(f"{letter(i)} parts at step {step:,}" for i, step in parted) or "no parting"
    parting = "not finite" if all(_is_nowhere_finite(comparison.final) for comparison in of_metric) else parting
    parting = "differs by design" if any(comparison.by_design for comparison in of_metric) and not parted else parting
    panel.set_title(first.metric + _averaged(first), loc="left", fontsize=11)
    panel.set_title(parting, loc="right", fontsize=9, color=GREY)
    if first.metric == "train/loss_scale":
        panel.set_yscale("log", base=2)


def letter(index: int) -> str:
    """The short name of a group by its index from 0: A, B, ... Z, 27, 28, ..."""
    return chr(ord("A") + index) if index < 26 else str(index + 1)
