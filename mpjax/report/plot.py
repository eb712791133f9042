"""Plots curves.png: loss, scores and loss scale over the steps of a run, with the skipped steps marked."""

import functools
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpjax.report.files import write_atomically


Records = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette, safe for colour-blind readers.
_BLUE, _VERMILION, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#4D4D4D"

_TRAIN = {"color": _BLUE, "linewidth": 1.3, "zorder": 2}
_TEST = {"color": _VERMILION, "linewidth": 1.6, "marker": "o", "markersize": 4.5, "zorder": 3}
_EMA = {"color": _GREEN, "linewidth": 1.6, "linestyle": (0, (4, 2)), "marker": "s", "markersize": 4, "zorder": 4}


def plot_curves(records: Records, path: str | os.PathLike[str], title: str = "") -> None:
    """Draws a panel for each of loss, scores and loss scale that the records have.

    The loss scale has no panel if it is always 1 and no step was skipped.

    Args:
      records: the result of `read_metrics`; nonfinite values leave a gap and a mark.
      path: the image file; its extension selects the format.
      title: the title above the panels.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    from matplotlib.figure import Figure  # not pyplot, which opens windows and shares state with the user's figures
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    drawers = [draw for draw, has_numbers in _PANELS if has_numbers(records)]
    heights = [2.0 if draw is _draw_loss_scale else 3.0 for draw in drawers] or [3.0]
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    figure = Figure(figsize=(8, 0.9 + sum(heights) * 0.85), dpi=150, layout=layout, facecolor="white")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel in axes:
        _dress(panel)
    for draw, panel in zip(drawers, axes, strict=False):
        draw(panel, records)
        _legend(panel)
    if not drawers:
        axes[0].text(0.5, 0.5, "no metrics yet", transform=axes[0].transAxes, ha="center", va="center", color=_GREY)
        axes[0].set_axis_off()
    axes[-1].set_xlabel("step (attempted)")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", color="#222222")

    ending = Path(path).suffix.lstrip(".") or "png"
    image = io.BytesIO()
    figure.savefig(image, format=ending)
    write_atomically(Path(path), image.getvalue())


def _draw_loss(panel, records: Records) -> None:
    panel.set_title("Loss", loc="left")
    _draw_curves(panel, records, "loss")


def _draw_share(panel, records: Records, metric: str, title: str) -> None:
    from matplotlib.ticker import PercentFormatter

    panel.set_title(title, loc="left")
    _draw_curves(panel, records, metric)
    panel.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    low, high = panel.get_ylim()
    low = max(low, -0.03)
    panel.set_ylim(low, min(high, 1.0 + 0.04 * (1.0 - low)))


def _draw_perplexity(panel, records: Records) -> None:
    panel.set_title("Perplexity", loc="left")
    _draw_curves(panel, records, "perplexity")


def _draw_loss_scale(panel, records: Records) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_title("Loss scale", loc="left")
    panel.set_yscale("log", base=2)
    steps, scales = _series(records, "train/loss_scale")
    panel.plot(steps, scales, color=_GREY, linewidth=1.5, drawstyle="steps-post", **_lonely(scales))
    known = [scale for scale in scales if scale > 0]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    room = max(1.15, 0.15 * math.log2(high / low))  # in powers of two; leaves space for the marks
    panel.set_ylim(low / 2**room, high * 2**room)
    panel.yaxis.set_major_locator(LogLocator(base=2, numticks=6))
    panel.yaxis.set_minor_locator(NullLocator())

    skipped = _skipped(records)
    if skipped:
        total = round(max(record.get("train/skipped", 0) for record in records))
        _mark_steps(panel, skipped, "|", _PURPLE, f"skipped ({total})")


def _draw_curves(panel, records: Records, metric: str) -> None:
    """Draws the curves of one metric: train, test, and test with averaged parameters."""
    curves = (
        ("train", _TRAIN, f"train/{metric}"),
        ("test", _TEST, f"test/{metric}"),
        ("test, averaged", _EMA, f"ema/{metric}"),
    )
    for label, style, name in curves:
        steps, values = _series(records, name)
        if steps:
            panel.plot(steps, values, label=label, **{**style, **_crowded(values), **_lonely(values)})
    lost = [step for _, _, name in curves for step in _not_finite(records, name)]
    _mark_steps(panel, lost, "x", _PURPLE, "not finite")


def _dress(panel) -> None:
    """Sets the style of a panel: a light grid behind the data, no box, and integer ticks on the step axis."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#999999")
    panel.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=_GREY, labelsize=9)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.margins(x=0.02, y=0.1)  # the margin below holds the marks


def _legend(panel) -> None:
    """Places the legend above the panel on the right, where it covers no data."""
    handles, labels = panel.get_legend_handles_labels()
    if handles:
        panel.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=len(labels),
            frameon=False,
            fontsize=9,
            borderaxespad=0.2,
        )


def _mark_steps(panel, steps: Sequence[int], marker: str, color: str, label: str) -> None:
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


def _series(records: Records, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of a metric, with NaN for nonfinite values."""
    found = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in found], [value if math.isfinite(value) else math.nan for _, value in found]


def _lonely(values: Sequence[float]) -> dict[str, Any]:
    """Returns a dot marker if fewer than two values are finite, because a line would not show."""
    return {"marker": "o", "markersize": 4.5} if sum(map(math.isfinite, values)) < 2 else {}


def _crowded(values: Sequence[float]) -> dict[str, Any]:
    """Returns the style of a thinner line without dots if there are too many values to tell dots apart."""
    return {"marker": "", "linewidth": 0.7 if len(values) > 400 else 1.3} if len(values) > 40 else {}


def _not_finite(records: Records, name: str) -> list[int]:
    return [record["step"] for record in records if not math.isfinite(record.get(name, 0.0))]


def _skipped(records: Records) -> list[int]:
    """Returns the reported steps at which the total of skipped steps increased."""
    totals = [(record["step"], record["train/skipped"]) for record in records if "train/skipped" in record]
    before = [0, *(total for _, total in totals)]
    return [step for (step, total), earlier in zip(totals, before, strict=False) if total > earlier]


def _has(metric: str):
    return lambda records: any(name.endswith(f"/{metric}") for record in records for name in record)


def _has_scaling(records: Records) -> bool:
    """Returns True if the loss scale was ever other than 1 or a step was skipped."""
    return any(record.get("train/loss_scale", 1.0) != 1.0 or record.get("train/skipped", 0) > 0 for record in records)


_PANELS = (
    (_draw_loss, _has("loss")),
    (functools.partial(_draw_share, metric="accuracy", title="Accuracy"), _has("accuracy")),
    (functools.partial(_draw_share, metric="iou", title="Intersection over union"), _has("iou")),
    (_draw_perplexity, _has("perplexity")),
    (_draw_loss_scale, _has_scaling),
)
