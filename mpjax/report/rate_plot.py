"""Plots a learning-rate range test: losses over rates, and the suggested rate."""

import os
from collections.abc import Sequence

import numpy as np

from mpjax.report.figure import BLUE, GREY, VERMILION, dress, legend_above, new_figure, save_figure


def plot_rates(
    points: Sequence[tuple[float, float]],
    smoothed: Sequence[float],
    suggestion: float | None,
    path: str | os.PathLike[str],
    title: str = "",
) -> None:
    """Draws the loss of each update and the smoothed loss over the learning rate.

    Args:
      points: `(rate, loss)` of each update.
      smoothed: the smoothed loss of each update.
      suggestion: the suggested rate, or None.
      path: the image file; its suffix selects the format.
      title: the title above the panel.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    low, high = min(smoothed), max(smoothed[: int(np.argmin(smoothed)) + 1])
    top = high + 0.5 * (high - low)
    cut = high > low and max(smoothed) > top  # the end, where the loss explodes
    figure = new_figure(8, 4, title, "The loss leaves the panel where it explodes." if cut else "")
    panel = figure.subplots()
    dress(panel)
    rates, losses = np.transpose(points)
    panel.plot(rates, losses, color=GREY, linewidth=0.8, alpha=0.5, label="of each batch")
    panel.plot(rates, smoothed, color=BLUE, linewidth=1.8, label="smoothed")
    if suggestion is not None:
        at = float(np.interp(suggestion, rates, smoothed))
        panel.plot(suggestion, at, "o", color=VERMILION, markersize=8, label=f"suggested: {suggestion:.2g}")
    panel.set_xscale("log")
    if high > low:
        panel.set_ylim(low - 0.1 * (high - low), top)
    panel.set_xlabel("learning rate")
    panel.set_title("loss", loc="left", fontsize=11)
    legend_above(panel)
    save_figure(figure, path)
