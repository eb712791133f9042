"""Plots the error by depth and the loss scale, as HTML for the page of a diagnosis."""

import html
import math
from collections.abc import Iterator, Sequence

from mpjax.diagnosis.facts import Facts, ScaleStep
from mpjax.diagnosis.formats import NARROW, range_of
from mpjax.diagnosis.trace import TraceRow


DENSE = 40
"""The number of modules above which rows are smaller."""


_APART = 0.18
"""The distance between the highest finite error and infinite errors, as a fraction of the range of finite errors."""


def name_of(path: str) -> str:
    """Escapes a path as HTML that may break after each slash; an empty path is "(no module)"."""
    return html.escape(path or "(no module)").replace("/", "/<wbr>")


def by_path(d: Facts) -> tuple[list[str], dict[tuple[str, str], TraceRow]]:
    """Lists the module paths of a diagnosis, and its rows by path and direction.

    The paths are in the order of the forward pass, then of the backward pass; "" (no module) is last. Rows of the
    optimizer's update are excluded, because their paths are the paths of parameters.
    """
    rows = [row for row in d.table if row.direction != "update"]
    ordered = sorted(rows, key=lambda row: (not row.path, row.direction != "forward"))
    return list(dict.fromkeys(row.path for row in ordered)), {(row.path, row.direction): row for row in rows}


def percent_of(value: float, low: float, high: float) -> str:
    """Formats the position of a value between `low` and `high` for CSS: "0" at `low`, "100" at `high`."""
    return f"{100 * (value - low) / (high - low):.4g}"


def errors(d: Facts) -> str:
    """Plots the relative error of each module, forward and backward, as an HTML section.

    One curve includes the errors of earlier modules. Another shows the module's own error; it is left out if it was not
    measured. Modules with inf or nan have marks on a line of their own above all finite errors.
    """
    paths, rows = by_path(d)
    values = [e for row in d.table for e in (row.error, row.own_error) if e and math.isfinite(e)]
    low = max(math.floor(math.log10(min(values, default=1e-4))), -12)
    high = max(math.ceil(math.log10(max(values, default=1.0))), low + 1)
    infinite = any(row.non_finite for row in rows.values())
    top = high + _APART * (high - low) if infinite else high
    isolated = any(row.own_error is not None for row in d.table)
    half = [range_of(row.dtype).epsilon / 2 for row in d.table if row.dtype in NARROW]
    panels = []
    for direction in ("forward", "backward"):
        indexed_rows = [(i, rows[path, direction]) for i, path in enumerate(paths) if (path, direction) in rows]
        if not indexed_rows:
            continue
        if direction == "backward":
            indexed_rows.reverse()
        width = len(paths)
        at = {i: (i if direction == "forward" else width - 1 - i) + 0.5 for i, _ in indexed_rows}
        finite = [(i, row) for i, row in indexed_rows if not row.non_finite]
        curves = [("carried", [(at[i], _log10(row.error, low)) for i, row in finite])]
        if isolated:
            curves.append(("own", [(at[i], _log10(row.own_error, low)) for i, row in indexed_rows]))
        lines = [_level(math.log10(max(half)), width, low, top)] if half and math.log10(max(half)) <= high else []
        lines += [_line(kind, points, low, top) + _dots(kind, points, low, top) for kind, points in curves]
        lines.append(_dots("lost", [(at[i], top) for i, row in indexed_rows if row.non_finite], low, top))
        numbers = (1, width) if direction == "forward" else (width, 1)
        ends = [f'<b class="{side}" style="left:{x}%">module {n}</b>' for side, x, n in
                zip(("first", "last"), (0, 100), numbers, strict=True)][: width]  # fmt: skip
        axis = f'<div class="axis">{"".join(ends)}</div>'
        ticks: list[tuple[float, str]] = [(e, f"10<sup>{e}</sup>") for e in _steps(low, high)]
        ticks += [(top, "inf")] if infinite else []
        title = "Forward, in program order" if direction == "forward" else "Backward, from the loss to the input"
        panels.append(f"<div><h3>{title}</h3>{_plot(ticks, low, top, width, ''.join(lines), axis)}</div>")
    own_legend = '<span class="own"><i></i>its own error, with float32 inputs</span>' if isolated else ""
    note = "" if isolated else " The own error of each module was not measured."
    lost = '<span class="lost"><i></i>inf: some results are inf or nan</span>' if infinite else ""
    return (
        '<section><h2>Error by depth</h2><p class="soft">Relative error of a module\'s results (Euclidean norm); '
        f"modules are numbered as above. Exact results lie on the bottom line.{note}</p>"
        f'<div class="legend"><span class="carried"><i></i>including earlier errors</span>{own_legend}{lost}'
        '<span style="--key:var(--soft)"><i class="dash"></i>one rounding to half precision</span></div>'
        f'<div class="charts">{"".join(panels)}</div></section>'
    )


def scales_of(scales: Sequence[ScaleStep]) -> str:
    """Plots the loss scale of a run as an HTML section, and marks the skipped steps; empty without steps."""
    if not scales:
        return ""
    exponents = [math.log2(step.scale) for step in scales if step.scale > 0]
    low, high = math.floor(min(exponents, default=0)) - 1, math.ceil(max(exponents, default=0)) + 1
    first, last = scales[0].step, scales[-1].step
    width = max(last - first, 1)
    points: list[tuple[float, float]] = []
    for step in scales:
        y = math.log2(step.scale) if step.scale > 0 else low
        points += [(step.step - first, points[-1][1])] if points else []
        points.append((step.step - first, y))
    skipped = [(step.step - first, low + 0.12 * (high - low)) for step in scales if step.skipped]
    lines = _line("carried", points, low, high) + _dots("lost", skipped, low, high)
    ends = f'<b class="first" style="left:0">step {first:,}</b>'
    ends += f'<b class="last" style="left:100%">step {last:,}</b>' if last > first else ""
    ticks: list[tuple[float, str]] = [(e, f"2<sup>{e}</sup>") for e in _steps(low, high)]
    plot = _plot(ticks, low, high, width, lines, f'<div class="axis">{ends}</div>')
    return (
        '<section><h2>Loss scale over the run</h2><div class="legend"><span class="carried"><i class="line"></i>loss '
        f'scale</span><span class="lost"><i></i>skipped ({len(skipped)} of {len(scales)} shown steps)</span></div>'
        f'<div class="charts one"><div>{plot}</div></div></section>'
    )


def _plot(ticks: list[tuple[float, str]], low: float, high: float, width: float, lines: str, axis: str) -> str:
    """Draws curves with an axis at the left and an axis below. The curves stretch with the page, the text does not."""
    labels = "".join(f'<span style="bottom:{percent_of(y, low, high)}%">{text}</span>' for y, text in ticks)
    grid = "".join(f'<path class="grid" d="M0 {high - y:g}h{width:g}"/>' for y, _ in ticks)
    view = f"0 0 {width:g} {high - low:g}"
    return (
        f'<div class="plot"><div class="ticks">{labels}</div><div class="chart">'
        f'<svg viewBox="{view}" preserveAspectRatio="none" overflow="visible">{grid}{lines}</svg></div>'
        f"<span></span>{axis}</div>"
    )


def _line(kind: str, points: Sequence[tuple[float, float]], low: float, high: float) -> str:
    return f'<path class="curve {kind}" d="M{"L".join(_coordinates(points, low, high))}"/>' if points else ""


def _dots(kind: str, points: Sequence[tuple[float, float]], low: float, high: float) -> str:
    """Draws dots as the round caps of zero-length lines, which stay round when the plot is stretched."""
    many = " many" if len(points) > DENSE else ""
    marks = "".join(f"M{point}h0" for point in _coordinates(points, low, high))
    return f'<path class="dots {kind}{many}" d="{marks}"/>' if points else ""


def _level(y: float, width: float, low: float, high: float) -> str:
    """Draws a dashed horizontal line at height `y`; empty if that is outside of the plot."""
    return f'<path class="dash" d="M0 {high - y:g}h{width:g}"/>' if low <= y <= high else ""


def _coordinates(points: Sequence[tuple[float, float]], low: float, high: float) -> Iterator[str]:
    """Yields the SVG coordinates of points, moved to the edge if they are above `high` or below `low`."""
    return (f"{x:g} {high - min(max(y, low), high):.4g}" for x, y in points)


def _log10(error: float | None, low: int) -> float:
    """The decimal logarithm of an error; `low` if the error is zero, not finite or not measured."""
    return math.log10(error) if error and math.isfinite(error) else low


def _steps(low: int, high: int) -> range:
    """Evenly spaced integers from `low`, at most `high`, at most six of them: the ticks of an axis."""
    return range(low, high + 1, -(-(high - low) // 5) or 1)
