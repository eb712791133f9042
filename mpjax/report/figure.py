"""The common parts of all plots: an empty figure, the colours, the style of a panel, and the file of a figure."""

import io
import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpjax.config.schema import Report
from mpjax.errors import printable
from mpjax.files import write_atomically


BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""

GREY = "#4D4D4D"
"""The colour of text."""


def new_figure(width: float, height: float, title: str = "", note: str = "") -> Any:
    """Creates an empty matplotlib figure, with a size in inches and a layout that leaves space for all texts.

    Args:
      width: the width in inches.
      height: the height in inches.
      title: the title above the panels; a long title is wrapped.
      note: an explanation of the figure, in small print below the panels.
    """
    from matplotlib.figure import Figure  # not pyplot, which opens windows and shares state with the user's figures
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    figure = Figure(figsize=(width, height), dpi=150, layout=layout, facecolor="white")
    if title:
        lines = textwrap.fill(title, round(9 * width))
        figure.suptitle(lines, fontsize=13, fontweight="bold", color="#222222")
    if note:
        figure.supxlabel(note, fontsize=8, color=GREY)
    return figure


def dress(panel, *, grid: Literal["x", "y"] = "y") -> None:
    """Sets the style of a panel: a light grid behind the data, grey axes at left and bottom, none at top and right."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#999999")
    panel.grid(axis=grid, color="#E6E6E6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=GREY, labelsize=9)


def step_panels(figure, heights: Sequence[float]) -> Any:
    """Adds panels of relative heights, one below the other, that share the steps of a run as their x axis.

    Returns them as an array of matplotlib axes, the top one first.
    """
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel in panels:
        dress(panel)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panels[-1].set_xlabel("step (attempted)")
    return panels


def dress_share(panel) -> None:
    """Sets the y axis of a panel of fractions, such as an accuracy, to percent.

    Limits beyond the range of fractions are moved to a little below 0 or a little above 100 %.
    """
    from matplotlib.ticker import PercentFormatter

    panel.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    low, high = panel.get_ylim()
    low = max(low, -0.03)
    panel.set_ylim(low, min(high, 1.0 + 0.04 * (1.0 - low)))


def dress_scale(panel, scales: Iterable[float]) -> None:
    """Sets the y axis of a panel of loss scales to powers of two, with space for marks at its lower edge.

    The limits cover all of `scales` that are positive.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_yscale("log", base=2)
    known = [scale for scale in scales if scale > 0]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    room = max(1.15, 0.15 * math.log2(high / low))  # in powers of two
    panel.set_ylim(low / 2**room, high * 2**room)
    panel.yaxis.set_major_locator(LogLocator(base=2, numticks=6))
    panel.yaxis.set_minor_locator(NullLocator())


def draw_band(panel, steps: Sequence[int], low: np.ndarray, high: np.ndarray, *, color: str, alpha: float) -> None:
    """Draws the area between two curves over the steps. A step without finite neighbours gets a vertical bar."""
    panel.fill_between(steps, low, high, color=color, alpha=alpha, linewidth=0)
    known = np.isfinite(low) & np.isfinite(high)
    beside = np.pad(known, 1)
    alone = np.flatnonzero(known & ~beside[:-2] & ~beside[2:])
    if len(alone):
        panel.vlines(np.take(steps, alone), low[alone], high[alone], color=color, alpha=2 * alpha, linewidth=5)


def legend_above(panel) -> None:
    """Places the legend above the panel on the right, where it covers no data. Without labels there is no legend."""
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


def image_files(stem: Path, settings: Report) -> list[Path]:
    """Lists the files of a plot, one for each format in the settings. Without plots the list is empty.

    >>> image_files(Path("run/curves"), Report(plot_format=("png", "svg")))
    [PosixPath('run/curves.png'), PosixPath('run/curves.svg')]
    """
    return [stem.with_name(f"{stem.name}.{kind}") for kind in settings.plot_format] if settings.plot else []


_UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
# The salt fixes the names inside an SVG; 42 embeds TrueType fonts in a PDF, as journals require.
_FIXED: dict[Any, Any] = {"svg.hashsalt": "mpjax", "pdf.fonttype": 42}


def save_figure(figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format of the path's suffix, or in PNG without one. An existing file is replaced.

    Control characters in the figure's texts are escaped in place.

    The same figure produces the same bytes: no date is stored.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
    kind = Path(path).suffix.lstrip(".").lower() or "png"
    image = io.BytesIO()
    with rc_context(_FIXED):
        figure.savefig(image, format=kind, metadata=_UNDATED.get(kind))
    write_atomically(Path(path), image.getvalue())
