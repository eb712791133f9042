"""Plots curves.png: loss, scores and loss scale over the steps of a run, with skipped steps and new settings marked."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

from mpjax.report.figure import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    VERMILION,
    dress_scale,
    dress_share,
    dress_steps,
    legend_above,
    new_figure,
    save_figure,
)
from mpjax.report.history import History, gaps_of, turns_of


Records = Sequence[Mapping[str, Any]]

CURVES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "train": ("train", {"color": BLUE, "linewidth": 1.3, "zorder": 2}),
    "test": ("test", {"color": VERMILION, "linewidth": 1.6, "marker": "o", "markersize": 4.5, "zorder": 3}),
    "test, averaged": (
        "ema",
        {"color": GREEN, "linewidth": 1.6, "linestyle": (0, (4, 2)), "marker": "s", "markersize": 4, "zorder": 4},
    ),
}
"""The curves of a metric by label: the first part of their name in metrics.jsonl, and their style."""


class PlottedMetric(NamedTuple):
    """A metric with a panel: its name, the panel's title, and True if it is a share, shown in percent."""

    name: str
    title: str
    is_share: bool = False


METRICS = (
    PlottedMetric("loss", "Loss"),
    PlottedMetric("accuracy", "Accuracy", is_share=True),
    PlottedMetric("iou", "Intersection over union", is_share=True),
    PlottedMetric("perplexity", "Perplexity"),
)


def plot_curves(records: Records, path: str | os.PathLike[str], title: str = "", history: History = ()) -> None:
    """Draws a panel for each of loss, scores and loss scale in the records.

    The loss scale has no panel if it is always 1 and no step was skipped.

    Args:
      records: the result of `read_metrics`; nonfinite values leave a gap and a mark.
      path: the image file; its extension selects the format.
      title: the title above the panels.
      history: the history of the run: dashed lines mark the steps at which its settings changed.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    turns = turns_of(history)

    def draw_metric(panel, metric: PlottedMetric) -> None:
        _draw_curves(panel, records, metric)
        _mark_turns(panel, turns)

    def draw_scale(panel) -> None:
        _draw_loss_scale(panel, records)
        _mark_turns(panel, turns)

    note = [MEANS] if any(name.startswith("train/") for record in records for name in record) else []
    note += [f"Dashed, from step {step:,}: {shorten(text, 120)}." for step, text in turns.items()]
    note += [f"The metrics of steps {gap} are lost." for gap in gaps_of(history)]
    draw_panels(records, draw_metric, draw_scale, path, title, "\n".join(note))


MEANS = "A value of training is the mean of the steps since the value before."


def _mark_turns(panel, turns: Mapping[int, str]) -> None:
    for step in turns:
        panel.axvline(step, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)


def draw_panels(
    records: Records,
    draw_metric: Callable[[Any, PlottedMetric], None],
    draw_scale: Callable[[Any], None],
    path: str | os.PathLike[str],
    title: str = "",
    note: str = "",
) -> None:
    """Writes a figure with a panel for each metric in the records, and a panel for the loss scale if it is in use.

    Args:
      records: the metrics of all runs of the figure.
      draw_metric: draws a metric into its panel, a matplotlib axes.
      draw_scale: draws the loss scale into its panel.
      path: the image file.
      title: the title above the panels.
      note: the small print below the panels.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    metrics, scaled = _metrics_in(records), _has_scaling(records)
    heights = [3.0] * len(metrics) + [2.0] * scaled or [3.0]
    lines = len(note.splitlines())
    figure = new_figure(8, 0.9 + 0.2 * lines + sum(heights) * 0.85, title, note)
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel in panels:
        dress_steps(panel)
        panel.margins(x=0.02, y=0.1)  # the margin below holds the marks
    for metric, panel in zip(metrics, panels, strict=False):
        panel.set_title(metric.title, loc="left")
        draw_metric(panel, metric)
    if scaled:
        panels[-1].set_title("Loss scale", loc="left")
        draw_scale(panels[-1])
    for panel in panels:
        legend_above(panel)
    if not metrics and not scaled:
        panels[0].text(0.5, 0.5, "no metrics yet", transform=panels[0].transAxes, ha="center", va="center", color=GREY)
        panels[0].set_axis_off()
    panels[-1].set_xlabel("step (attempted)")
    save_figure(figure, path)


def _draw_loss_scale(panel, records: Records) -> None:
    steps, scales = series(records, "train/loss_scale")
    panel.plot(steps, scales, color=GREY, linewidth=1.5, drawstyle="steps-post", **lonely(scales))
    dress_scale(panel, scales)
    skipped = skipped_steps(records)
    if skipped:
        total = round(max(record.get("train/skipped", 0) for record in records))
        mark_steps(panel, skipped, "|", PURPLE, f"skipped ({total})")


def _draw_curves(panel, records: Records, metric: PlottedMetric) -> None:
    """Draws the curves of a metric, and labels the last value of evaluation curves."""
    tested = []
    for label, (part, style) in CURVES.items():
        steps, values = series(records, f"{part}/{metric.name}")
        if steps:
            panel.plot(steps, values, label=label, **{**style, **_crowded(values), **lonely(values)})
        if part != "train":
            tested.append((style["color"], steps, values))
    label_last(panel, tested, metric)
    lost = [step for part, _ in CURVES.values() for step in not_finite(records, f"{part}/{metric.name}")]
    mark_steps(panel, lost, "x", PURPLE, "not finite")
    if metric.is_share:
        dress_share(panel)


def label_last(panel, curves: Iterable[tuple[str, Sequence[int], Sequence[float]]], metric: PlottedMetric) -> None:
    """Writes the last finite value of each of up to two curves beside its point, the higher value above the other.

    Args:
      panel: the matplotlib axes.
      curves: the color, the steps and the values of each curve.
      metric: the metric of the curves.
    """
    ends = []
    for color, steps, values in curves:
        known = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        ends += [(*known[-1], color)] if known else []
    places = ("center",) if len(ends) == 1 else ("top", "bottom")
    for (value, step, color), place in zip(sorted(ends), places, strict=False):
        panel.annotate(
            f"{value:.1%}" if metric.is_share else f"{value:.3g}",
            (step, value),
            xytext=(7, 0),
            textcoords="offset points",
            va=place,
            fontsize=9,
            color=color,
        )


def mark_steps(panel, steps: Sequence[int], marker: str, color: str, label: str) -> None:
    """Draws marks at the lower edge of the panel, independent of its y axis."""
    if steps:
        panel.plot(
            steps,
            [0.04] * len(steps),
            transform=panel.get_xaxis_transform(),
            linestyle="none",
            marker=marker,
            markersize=8,
            markeredgewidth=1.6,
            color=color,
            label=label,
            clip_on=False,
        )


def series(records: Records, name: str) -> tuple[list[int], list[float]]:
    """The steps and values of a metric, with NaN for nonfinite values; empty lists if the metric is missing."""
    found = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in found], [value if math.isfinite(value) else math.nan for _, value in found]


def lonely(values: Sequence[float]) -> dict[str, Any]:
    """A dot marker if fewer than two values are finite, because a line would be invisible."""
    return {"marker": "o", "markersize": 4.5} if sum(map(math.isfinite, values)) < 2 else {}


def _crowded(values: Sequence[float]) -> dict[str, Any]:
    """The style of a thinner line without dots, if there are too many values to tell dots apart."""
    return {"marker": "", "linewidth": 0.7 if len(values) > 400 else 1.3} if len(values) > 40 else {}


def not_finite(records: Records, name: str) -> list[int]:
    """The steps at which a metric is not finite."""
    return [record["step"] for record in records if not math.isfinite(record.get(name, 0.0))]


def skipped_steps(records: Records) -> list[int]:
    """The reported steps at which the total of skipped steps increases."""
    totals = [(record["step"], record["train/skipped"]) for record in records if "train/skipped" in record]
    before = [0, *(total for _, total in totals)]
    return [step for (step, total), earlier in zip(totals, before, strict=False) if total > earlier]


def _metrics_in(records: Records) -> list[PlottedMetric]:
    names = {name.rpartition("/")[2] for record in records for name in record if "/" in name}
    return [metric for metric in METRICS if metric.name in names]


def _has_scaling(records: Records) -> bool:
    """True if the loss scale was ever different from 1, or a step was skipped."""
    return any(record.get("train/loss_scale", 1.0) != 1.0 or record.get("train/skipped", 0) > 0 for record in records)
