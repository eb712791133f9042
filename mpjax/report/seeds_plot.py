"""Plots seeds.png: the curves of the runs of several seeds, with their mean and spread."""

import os
from collections.abc import Mapping

import numpy as np

from mpjax.report.figure import GREY, PURPLE, draw_band, dress_scale, dress_share
from mpjax.report.plot import (
    CURVES,
    MEANS,
    PlottedMetric,
    Records,
    draw_panels,
    label_last,
    lonely,
    mark_steps,
    not_finite,
    series,
    skipped_steps,
)


Runs = Mapping[int, Records]


def plot_seeds(runs: Runs, path: str | os.PathLike[str], title: str = "") -> None:
    """Draws a panel for each of loss, scores and loss scale: a thin line for each seed, the mean, and a band of the
    spread.

    Mean and band cover the steps that all runs have, with a gap at nonfinite values.

    Args:
      runs: the result of `read_metrics` of each seed.
      path: the image file; its suffix selects the format.
      title: the title above the panels.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    told = "One seed: its spread is not known, so there is no band."
    if len(runs) > 1:
        told = f"Thick: mean of {len(runs)} seeds. Band: one standard deviation. Thin: each seed."
    draw_panels(
        [record for records in runs.values() for record in records],
        lambda panel, metric: _draw_metric(panel, runs, metric),
        lambda panel: _draw_scales(panel, runs),
        path,
        title,
        f"{told} {MEANS}",
    )


def _draw_metric(panel, runs: Runs, metric: PlottedMetric) -> None:
    tested = []
    for label, (part, style) in CURVES.items():
        name = f"{part}/{metric.name}"
        color = style["color"]
        for own in filter(any, (series(records, name) for records in runs.values())):
            panel.plot(*own, color=color, linewidth=0.7, alpha=0.45, zorder=1, **lonely(own[1]))
        steps, values = together(runs, name)
        if steps:
            mean, std = values.mean(axis=0), values.std(axis=0, ddof=1) if len(runs) > 1 else 0.0
            draw_band(panel, steps, mean - std, mean + std, color=color, alpha=0.18)
            panel.plot(
                steps,
                mean,
                label=label,
                **{**style, "linewidth": 2.0, "marker": style.get("marker", "") if len(steps) <= 40 else ""}
                | lonely(mean.tolist()),
            )
            if part != "train":
                tested.append((color, steps, mean))
    label_last(panel, tested, metric)
    lost = [
        step for part, _ in CURVES.values() for records in runs.values()
        for step in not_finite(records, f"{part}/{metric.name}")
    ]  # fmt: skip
    mark_steps(panel, lost, "x", PURPLE, "not finite")
    if metric.is_share:
        dress_share(panel)


def together(runs: Runs, name: str) -> tuple[list[int], np.ndarray]:
    """The steps at which all runs have a metric, and its values there, float64 [runs, steps]."""
    curves = [dict(zip(*series(records, name), strict=True)) for records in runs.values()]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return steps, np.array([[curve[step] for step in steps] for curve in curves], np.float64)


def _draw_scales(panel, runs: Runs) -> None:
    scales: list[float] = []
    for records in runs.values():
        steps, values = series(records, "train/loss_scale")
        panel.plot(steps, values, color=GREY, linewidth=1.0, alpha=0.6, drawstyle="steps-post")
        scales += values
    dress_scale(panel, scales)
    total = sum(max((r.get("train/skipped", 0) for r in records), default=0) for records in runs.values())
    skipped = [step for records in runs.values() for step in skipped_steps(records)]
    mark_steps(panel, skipped, "|", PURPLE, f"skipped ({total:.0f} in all)")
