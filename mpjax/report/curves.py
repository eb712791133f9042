"""Plots loss, scores and loss scale over the steps: curves.png of one run, seeds.png of the runs of several seeds."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from mpjax.report.figure import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    VERMILION,
    draw_band,
    dress_scale,
    dress_share,
    legend_above,
    new_figure,
    save_figure,
    step_panels,
)
from mpjax.report.history import History, gaps_of, turns_of
from mpjax.report.jsonl import Records


CURVES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "train": ("train", {"color": BLUE, "linewidth": 1.3, "zorder": 2}),
    "test": ("test", {"color": VERMILION, "linewidth": 1.6, "marker": "o", "markersize": 4.5, "zorder": 3}),
    "test, averaged": (
        "ema",
        {"color": GREEN, "linewidth": 1.6, "linestyle": (0, (4, 2)), "marker": "s", "markersize": 4, "zorder": 4},
    ),
}
"""The curves of a metric by label: the first part of their name in metrics.jsonl, and their style."""

MEANS = "A value of training is the mean of the steps since the value before."


class PlottedMetric(NamedTuple):
    """A metric with a panel of its own.

    Attributes:
      name: the name of the metric, without `train/` or `test/`.
      title: the title of the panel.
      is_fraction: True if the values are fractions, which are shown in percent.
    """

    name: str
    title: str
    is_fraction: bool = False


METRICS = (
    PlottedMetric("loss", "Loss"),
    PlottedMetric("accuracy", "Accuracy", is_fraction=True),
    PlottedMetric("iou", "Intersection over union", is_fraction=True),
    PlottedMetric("perplexity", "Perplexity"),
    PlottedMetric("rmse", "Root mean squared error"),
    PlottedMetric("f1", "F1", is_fraction=True),
    PlottedMetric("image_to_text", "Recall of texts of images", is_fraction=True),
    PlottedMetric("text_to_image", "Recall of images of texts", is_fraction=True),
)


class Curve(NamedTuple):
    """A metric of a run over its steps, with NaN for nonfinite values."""

    steps: Sequence[int]
    values: Sequence[float]


def plot_curves(records: Records, path: str | os.PathLike[str], title: str = "", history: History = ()) -> None:
    """Plots the metrics of a run over its steps, a panel for each, and writes the figure to a file.

    There is a panel for each metric of `METRICS` (loss, accuracy and others) in the records, and for the loss scale.
    Other metrics, such as a user's, have no panel, nor has a loss scale that is always 1 if no step was skipped.
    Without any panel, the figure says that there are no metrics yet.

    Args:
      records: the result of `read_metrics`; nonfinite values leave a gap and a mark.
      path: the image file; its extension selects the format.
      title: the title above the panels.
      history: the history of the run: dashed lines mark the steps at which its settings changed.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    turns = turns_of(history)
    note = [MEANS] if any(name.startswith("train/") for record in records for name in record) else []
    note += [f"Dashed, from step {step:,}: {shorten(text, 120)}." for step, text in turns.items()]
    note += [f"Metrics of steps {gap} are lost." for gap in gaps_of(history)]
    scale_style = {"linewidth": 1.5, **_lonely(series(records, "train/loss_scale").values)}
    figure = _figure([records], _draw_curve, scale_style, "skipped ({:.0f})", title, "\n".join(note), turns)
    save_figure(figure, path)


def plot_seeds(runs: Mapping[int, Records], path: str | os.PathLike[str], title: str = "") -> None:
    """Plots the metrics of runs with different seeds: a thin line for each seed, the mean, and a band.

    The panels are as in `plot_curves`. The band is one sample standard deviation to each side; one seed alone has none.
    Mean and band cover the steps that all runs have, with a gap at nonfinite values. Loss scales have lines only.

    Args:
      runs: the result of `read_metrics` for each run, by seed.
      path: the image file; its suffix selects the format.
      title: the title above the panels.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    band = "One seed: its spread is not known, so there is no band."
    if len(runs) > 1:
        band = f"Thick: mean of {len(runs)} seeds. Band: one standard deviation. Thin: each seed."
    scale_style = {"linewidth": 1.0, "alpha": 0.6}
    figure = _figure([*runs.values()], _draw_mean, scale_style, "skipped ({:.0f} in all)", title, f"{band} {MEANS}")
    save_figure(figure, path)


def _figure(
    runs: Sequence[Records],
    draw: Callable[[Any, Sequence[Curve], str, Mapping[str, Any]], Curve],
    scale_style: Mapping[str, Any],
    skipped: str,
    title: str,
    note: str,
    turns: Iterable[int] = (),
) -> Any:
    """Draws a panel for each metric of the runs, and a panel for the loss scale if it is in use.

    Args:
      runs: the metrics of each run.
      draw: `(panel, curves, label, style) -> curve` draws a metric of all runs, and returns the curve whose last value
        is labelled.
      scale_style: the style of each loss scale.
      skipped: the label of skipped steps, to format with their number.
      title: the title above the panels.
      note: the small print below the panels.
      turns: the steps that dashed lines mark.
    """
    records = [record for run in runs for record in run]
    names = {name.rpartition("/")[2] for record in records for name in record if "/" in name}
    metrics = [metric for metric in METRICS if metric.name in names]
    scaled = any(record.get("train/loss_scale", 1.0) != 1.0 or record.get("train/skipped", 0) > 0 for record in records)
    heights = [3.0] * len(metrics) + [2.0] * scaled or [3.0]
    figure = new_figure(8, 0.9 + 0.2 * len(note.splitlines()) + sum(heights) * 0.85, title, note)
    panels = step_panels(figure, heights)
    for panel in panels:
        panel.margins(x=0.02, y=0.1)  # the margin below holds the marks
    for metric, panel in zip(metrics, panels, strict=False):
        panel.set_title(metric.title, loc="left")
        _draw_metric(panel, runs, metric, draw)
    if scaled:
        panels[-1].set_title("Loss scale", loc="left")
        _draw_loss_scale(panels[-1], runs, scale_style, skipped)
    for panel in panels if metrics or scaled else ():
        for step in turns:
            panel.axvline(step, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        legend_above(panel)
    if not metrics and not scaled:
        panels[0].text(0.5, 0.5, "no metrics yet", transform=panels[0].transAxes, ha="center", va="center", color=GREY)
        panels[0].set_axis_off()
    return figure


def _draw_metric(panel, runs: Sequence[Records], metric: PlottedMetric, draw: Callable) -> None:
    """Draws the curves of a metric, and labels the last value of evaluation curves."""
    tested, lost = [], []
    for label, (prefix, style) in CURVES.items():
        curves = [series(run, f"{prefix}/{metric.name}") for run in runs]
        curve = draw(panel, curves, label, style)
        if prefix != "train":
            tested.append((style["color"], curve))
        lost += [step for steps, values in curves for step, value in zip(steps, values, strict=True) if value != value]
    _label_last(panel, tested, metric)
    _mark_steps(panel, lost, "x", "not finite")
    if metric.is_fraction:
        dress_share(panel)


def _draw_curve(panel, curves: Sequence[Curve], label: str, style: Mapping[str, Any]) -> Curve:
    """Draws the curve of a single run."""
    (curve,) = curves
    if curve.steps:
        panel.plot(*curve, label=label, **{**style, **_crowded(curve.values), **_lonely(curve.values)})
    return curve


def _draw_mean(panel, curves: Sequence[Curve], label: str, style: Mapping[str, Any]) -> Curve:
    """Draws a thin line for each run, the mean, and a band of one standard deviation. Returns the mean.

    The mean is empty if the runs have no step in common.
    """
    color = style["color"]
    for curve in curves:
        if curve.steps:
            panel.plot(*curve, color=color, linewidth=0.7, alpha=0.45, zorder=1, **_lonely(curve.values))
    steps, values = together(curves)
    if not steps:
        return Curve((), ())
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1) if len(curves) > 1 else 0.0
    draw_band(panel, steps, mean - std, mean + std, color=color, alpha=0.18)
    marker = style.get("marker", "") if len(steps) <= 40 else ""
    panel.plot(steps, mean, label=label, **{**style, "linewidth": 2.0, "marker": marker, **_lonely(mean.tolist())})
    return Curve(steps, mean.tolist())


def together(curves: Sequence[Curve]) -> tuple[list[int], np.ndarray]:
    """The steps that all curves have, sorted, and the values there, float64 [curves, steps]."""
    at = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = sorted(set.intersection(*map(set, at))) if at else []
    return steps, np.array([[values[step] for step in steps] for values in at], np.float64)


def _draw_loss_scale(panel, runs: Sequence[Records], style: Mapping[str, Any], skipped: str) -> None:
    curves = [series(run, "train/loss_scale") for run in runs]
    for curve in curves:
        panel.plot(*curve, color=GREY, drawstyle="steps-post", **style)
    dress_scale(panel, [scale for curve in curves for scale in curve.values])
    totals = [series(run, "train/skipped") for run in runs]
    number = sum(max(total.values, default=0.0) for total in totals)
    _mark_steps(panel, [step for total in totals for step in _rises(total)], "|", skipped.format(number))


def _label_last(panel, curves: Iterable[tuple[str, Curve]], metric: PlottedMetric) -> None:
    """Writes the last finite value of each of up to two curves next to its point, the higher value above the other."""
    ends = []
    for color, curve in curves:
        finite = [(value, step) for step, value in zip(*curve, strict=True) if math.isfinite(value)]
        ends += [(*finite[-1], color)] if finite else []
    alignments = ("center",) if len(ends) == 1 else ("top", "bottom")
    for (value, step, color), alignment in zip(sorted(ends), alignments, strict=False):
        panel.annotate(
            f"{value:.1%}" if metric.is_fraction else f"{value:.3g}",
            (step, value),
            xytext=(7, 0),
            textcoords="offset points",
            va=alignment,
            fontsize=9,
            color=color,
        )


def _mark_steps(panel, steps: Sequence[int], marker: str, label: str) -> None:
    """Draws marks at the lower edge of the panel, independent of its y axis; nothing without steps."""
    if steps:
        panel.plot(
            steps,
            [0.04] * len(steps),
            transform=panel.get_xaxis_transform(),
            linestyle="none",
            marker=marker,
            markersize=8,
            markeredgewidth=1.6,
            color=PURPLE,
            label=label,
            clip_on=False,
        )


def series(records: Records, name: str) -> Curve:
    """The curve of the metric `name` in a run's records, with NaN for nonfinite values; empty if there is none."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return Curve([step for step, _ in points], [value if math.isfinite(value) else math.nan for _, value in points])


def _lonely(values: Sequence[float]) -> dict[str, Any]:
    """The style of a dot, if fewer than two values are finite, because a line would be invisible; else empty."""
    return {"marker": "o", "markersize": 4.5} if sum(map(math.isfinite, values)) < 2 else {}


def _crowded(values: Sequence[float]) -> dict[str, Any]:
    """The style of a thinner line without dots, if there are more than 40 values; else empty."""
    return {"marker": "", "linewidth": 0.7 if len(values) > 400 else 1.3} if len(values) > 40 else {}


def _rises(total: Curve) -> list[int]:
    """The steps at which a total is larger than at the step before; also the first step, if it is above 0."""
    before = [0, *total.values]
    return [step for step, value, earlier in zip(*total, before, strict=False) if value > earlier]
