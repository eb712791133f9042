"""Plots the memory and the best-case step time of plans, by GPU and policy."""

import os
from collections.abc import Sequence

from mpjax.plan.estimate import Estimate
from mpjax.report.figure import BLUE, GREY, VERMILION, dress, new_figure, save_figure


# Okabe and Ito's palette, which colour-blind readers can tell apart.
_MEMORY = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "statistics": "#CC79A7",
    "batch": "#E69F00",
    "temporary": "#009E73",
    "extra": "#D55E00",
}
_LINES = ("memory limit", "measured")
_ARITHMETIC, _TRAFFIC = BLUE, VERMILION


def plot_plans(plans: Sequence[Estimate], path: str | os.PathLike[str], title: str = "") -> None:
    """Draws memory and time in two panels, with one row of bars per plan, and writes the figure to an image file.

    Args:
      plans: the plans, at least one, in drawing order from above.
      path: the image file. Its suffix selects the format; without a suffix the format is PNG.
      title: a title above the panels; empty for none.

    Raises:
      OSError: the file cannot be written. The message names it.
    """
    figure = new_figure(11, 1.6 + 0.45 * len(plans), title)
    memory, time = figure.subplots(1, 2, sharey=True)
    places = range(len(plans))
    _draw_memory(memory, plans, places)
    _draw_time(time, plans, places)
    names = [f"{plan.gpu}  {plan.title}" for plan in plans]
    memory.set_yticks(list(places), names)
    memory.invert_yaxis()
    for panel in (memory, time):
        dress(panel, grid="x")
        # matplotlib lists lines first; bars belong before them.
        entries = sorted(zip(*panel.get_legend_handles_labels(), strict=True), key=lambda pair: pair[1] in _LINES)
        anchor = (0, -0.16 - 0.3 / len(plans))
        panel.legend(
            *zip(*entries, strict=True), loc="upper left", bbox_to_anchor=anchor, ncols=3, frameon=False, fontsize=8
        )
    save_figure(figure, path)


def _draw_memory(panel, plans: Sequence[Estimate], places: range) -> None:
    panel.set_title("Peak memory, GB per GPU", loc="left", fontsize=11)
    ends = [0.0] * len(plans)
    for kind, color in _MEMORY.items():
        sizes = [getattr(plan.memory, kind) / 1e9 for plan in plans]
        if max(sizes) > 0.002 * max(plan.memory.total / 1e9 for plan in plans):
            panel.barh(places, sizes, left=ends, color=color, label=kind, height=0.62)
        ends = [end + more for end, more in zip(ends, sizes, strict=True)]
    for y, plan in zip(places, plans, strict=True):
        limit = plan.limit / 1e9
        label = _LINES[0] if y == 0 else None
        panel.plot([limit, limit], [y - 0.42, y + 0.42], color="#222222", linewidth=2, label=label)


def _draw_time(panel, plans: Sequence[Estimate], places: range) -> None:
    panel.set_title("Step time at peak rates, ms", loc="left", fontsize=11)
    compute = [plan.roofline.compute * 1e3 for plan in plans]
    traffic = [plan.roofline.traffic * 1e3 for plan in plans]
    above = [y - 0.16 for y in places]
    below = [y + 0.16 for y in places]
    panel.barh(above, compute, color=_ARITHMETIC, height=0.3, label="arithmetic")
    panel.barh(below, traffic, color=_TRAFFIC, height=0.3, label="traffic")
    for y, plan in zip(places, plans, strict=True):
        end = plan.roofline.seconds * 1e3
        panel.annotate(
            f"{plan.items_per_second:,.0f}/s",
            (end, y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=GREY,
        )
    measured = [(plan.measured.seconds * 1e3, y) for y, plan in enumerate(plans) if plan.measured]
    if measured:
        panel.plot(*zip(*measured, strict=True), "D", color="#222222", markersize=6, label=_LINES[1])
    panel.margins(x=0.16)
