"""Plots the exponents of each module's values against the range of half precision."""

import functools
import html
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpjax.diagnosis.facts import Facts
from mpjax.diagnosis.formats import NARROW, range_of
from mpjax.diagnosis.readings import EXPONENTS
from mpjax.diagnosis.render.curves import DENSE, by_path, name_of, percent_of
from mpjax.diagnosis.render.text import COLUMNS, row_texts
from mpjax.diagnosis.trace import Row


def range_strips(d: Facts) -> str:
    """Plots a strip for each module and direction, which shows how many values have each exponent."""
    paths, rows = by_path(d)
    low, high = _window(d.table)
    half = Counter(row.dtype for row in d.table if row.dtype in NARROW).most_common(1)
    limits = _limits(half[0][0]) if half else None
    updates = {(row.path, row.direction): row for row in d.table if row.direction == "update"}

    def panel(title: str, direction: str, paths: Sequence[str], rows: Mapping[tuple[str, str], Row]) -> str:
        cells = [f"<span></span>{_axis(limits, low, high)}"]
        for number, path in enumerate(paths, start=1):
            here = " here" if (path, direction) == (d.path, d.direction) else ""
            strip = _strip(rows[path, direction], low, high) if (path, direction) in rows else ""
            cells.append(
                f'<span class="name{here}"><small>{number}</small> <span>{name_of(path)}</span></span>'
                f'<div class="strip">{strip}</div>'
            )
        dense = " dense" if len(paths) > DENSE else ""
        return f'<div><h3>{title}</h3><div class="strips{dense}">{"".join(cells)}</div></div>'

    panels = [
        panel("Forward: results", "forward", paths, rows),
        panel("Backward: gradients, times the loss scale", "backward", paths, rows),
    ]
    if updates:
        panels.append(panel("Update, by parameter", "update", [path for path, _ in updates], updates))
    return (
        "<section><h2>Ranges by module</h2>"
        '<p class="soft">Magnitudes of the values in float32, by power of two; modules in program order. '
        f"A stronger colour means more values. {_limits_text(half[0][0]) if half else ''}</p>"
        '<div class="legend"><span><i style="--key:var(--normal)"></i>fits</span>'
        '<span><i style="--key:var(--subnormal)"></i>subnormal: loses bits</span>'
        '<span><i style="--key:var(--zero)"></i>too small: zero</span>'
        '<span><i style="--key:var(--overflow)"></i>too large: inf</span></div>'
        f'<div class="charts">{"".join(panels)}</div></section>'
    )


def _window(table: Iterable[Row]) -> tuple[int, int]:
    """Returns the exponents to draw: those that occur, and at least float16's range with a margin."""
    seen = [e for row in table if row.exponents for e in row.exponents]
    return max(min([*seen, -27]), EXPONENTS.start), min(max([*seen, 18]) + 1, EXPONENTS.stop)


@functools.cache
def _limits(dtype: np.dtype) -> tuple[int, int, int]:
    """Returns the exponents of the smallest subnormal, the smallest normal and the first power of two that is inf."""
    band = range_of(dtype)
    return (
        round(math.log2(band.smallest_subnormal)),
        round(math.log2(band.smallest_normal)),
        math.ceil(math.log2(band.largest)),
    )


def _limits_text(dtype: np.dtype) -> str:
    zero, subnormal, overflow = (f"2<sup>{e}</sup>" for e in _limits(dtype))
    beyond = " (outside this plot)" if _limits(dtype)[1] < EXPONENTS.start else ""
    return (
        f"{dtype.name} overflows to inf from {overflow}, is subnormal below {subnormal} and underflows to zero below "
        f"{zero}{beyond}."
    )


def _axis(limits: tuple[int, int, int] | None, low: int, high: int) -> str:
    """Draws the labels of the limits, and of the ends if there is room; a narrow screen shows fewer."""
    zero, subnormal, overflow = limits or (low, 0, high)
    placed: dict[int, bool] = {}
    for exponent in (overflow, subnormal, zero, low, high):
        room = min((abs(exponent - other) / (high - low) for other in placed), default=1.0)
        if low <= exponent <= high and room >= 0.16:
            placed[exponent] = room >= 0.26
    marks = []
    for exponent in sorted(placed):
        side = {low: "first", high: "last"}.get(exponent, "") + ("" if placed[exponent] else " wide")
        marks.append(f'<b class="{side}" style="left:{percent_of(exponent, low, high)}%">2<sup>{exponent}</sup></b>')
    return f'<div class="axis">{"".join(marks)}</div>'


def _strip(row: Row, low: int, high: int) -> str:
    is_half = row.dtype in NARROW
    zero, subnormal, overflow = _limits(row.dtype)
    counts = {e: count for e, count in zip(EXPONENTS, row.histogram, strict=True) if count and low <= e < high}
    most = max(counts.values(), default=1)
    cells: dict[tuple[str, int], str] = {}
    for e, count in counts.items():
        kind = "normal"
        if is_half:
            kind = "zero" if e < zero else "subnormal" if e < subnormal else "overflow" if e >= overflow else kind
        key = kind, math.ceil(4 * math.sqrt(count / most))
        cells[key] = cells.get(key, "") + f"M{e - low} 0h1v1h-1z"
    parts = [f'<path class="{kind}" opacity="{level / 4:g}" d="{d}"/>' for (kind, level), d in cells.items()]
    band = lines = ""
    if is_half:
        left, right = max(subnormal, low), min(overflow, high)
        band = f'<rect class="band" x="{left - low}" width="{right - left}" height="1"/>'
        lines = "".join(f'<path class="limit" d="M{e - low} 0v1"/>' for e in _limits(row.dtype) if low < e < high)
    values = dict(zip(COLUMNS, row_texts(row), strict=True))
    told = ", ".join(f"{name} {text}" for name, text in values.items() if name not in ("path", "direction"))
    title = html.escape(f"{values['path']} ({row.direction}): {told}")
    return (
        f'<svg viewBox="0 0 {high - low} 1" preserveAspectRatio="none" shape-rendering="crispEdges" role="img">'
        f"<title>{title}</title>{band}{''.join(parts)}{lines}</svg>"
    )
