"""A diagnosis as one HTML page that needs no network: verdict, advice, ranges, errors, lost gradients, the table."""

import functools
import html
import math
import pathlib
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mpjax.diagnosis.diagnosis import COLUMNS, Diagnosis, Row, ScaleStep, percent, row_texts
from mpjax.diagnosis.readings import EXPONENTS
from mpjax.precision.dtypes import HALF, float_range


_TEMPLATE = pathlib.Path(__file__).with_name("page.html")

_VERDICTS = {
    "healthy": ("good", "Healthy", "Precision is not a problem here"),
    "overflow": ("bad", "Overflow", "Values too large for half precision"),
    "underflow": ("bad", "Underflow", "Values too small for half precision become zero"),
    "rounding": ("bad", "Rounding", "Too few digits for this computation"),
    "loss_scale": ("bad", "Loss scale", "The loss scale is too high"),
    "not_precision": ("other", "Not precision", "The step fails in float32 too"),
}

_FLAG = re.compile(r"--[\w.]*\w")
_DENSE = 40  # modules from which their rows are set smaller


def page_of(diagnosis: Diagnosis, scales: Sequence[ScaleStep] = ()) -> str:
    """The page.

    Args:
      diagnosis: what it says.
      scales: the loss scale of a run, drawn if there is any.
    """
    sections = [_verdict(diagnosis), _advice(diagnosis)]
    if diagnosis.table:
        sections += [_ranges(diagnosis), _errors(diagnosis)]
    sections += [_flushed(diagnosis), _scales(scales), _table(diagnosis)]
    title = html.escape(f"{_VERDICTS[diagnosis.verdict][1]}: mpjax diagnosis")
    template = string.Template(_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=title, body="\n".join(filter(None, sections)))


def _verdict(d: Diagnosis) -> str:
    tone, word, headline = _VERDICTS[d.verdict]
    if d.path is not None:
        headline = f"{headline}: {d.path or 'outside of all modules'}"
    place = [f"{d.direction} pass" if d.direction else None, d.operation, d.source]
    wide, low = d.loss[1], d.loss[0]
    facts = {
        "Loss in half precision": _number(low),
        "Loss in float32": _number(wide),
        "Difference": "none" if low == wide else f"{abs(low - wide) / abs(wide):.2g} of it" if wide else "-",
        "Loss scale": f"{d.loss_scale:.10g}",
        "Modules": str(len({row.path for row in d.table if row.path})),
        "Policy": d.policy.replace(",", ", ").replace(";", "; "),
    }
    if not math.isfinite(low) or not math.isfinite(wide):
        del facts["Difference"]
    return (
        f'<section class="verdict {tone}"><span class="kicker">{word}</span><h1>{html.escape(headline)}</h1>'
        f'<p class="soft">{html.escape(" · ".join(filter(None, place)))}</p><p>{html.escape(d.evidence)}</p><dl>'
        + "".join(f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in facts.items())
        + "</dl></section>"
    )


def _advice(d: Diagnosis) -> str:
    if not d.toml and not d.advice:
        return ""
    lines = [f"<p>{_FLAG.sub(_as_code, html.escape(line))}</p>" for line in d.advice]
    if d.toml:
        proof = "A run with this change is healthy." if d.verified else "Not verified: a run with it is not healthy."
        share = f" {d.float32_flops:.1%} of the products' work leaves half precision." if d.rules else ""
        lines = [f"<p>{proof}{share}</p>"] if d.rules else lines
        for name, text in (("In a config file", d.toml), ("Or on the command line", d.flags)):
            lines.append(f'<div class="copy"><h3>{name}</h3><button>copy</button></div><pre>{html.escape(text)}</pre>')
    return f"<section><h2>What to change</h2>{''.join(lines)}</section>"


def _as_code(match: re.Match) -> str:
    return f"<code>{match[0]}</code>"


# Ranges


def _ranges(d: Diagnosis) -> str:
    """A strip for each module and direction: how many values have which exponent."""
    paths, rows = _by_path(d)
    low, high = _window(d.table)
    half = Counter(row.dtype for row in d.table if row.dtype in HALF).most_common(1)
    limits = _limits(half[0][0]) if half else None
    panels = []
    for direction in ("forward", "backward"):
        cells = [f"<span></span>{_axis(limits, low, high)}"]
        for number, path in enumerate(paths, start=1):
            here = " here" if (path, direction) == (d.path, d.direction) else ""
            strip = _strip(rows[path, direction], low, high) if (path, direction) in rows else ""
            cells.append(
                f'<span class="name{here}"><small>{number}</small> <span>{_name(path)}</span></span>'
                f'<div class="strip">{strip}</div>'
            )
        dense = " dense" if len(paths) > _DENSE else ""
        title = "Forward: results" if direction == "forward" else "Backward: gradients, times the loss scale"
        panels.append(f'<div><h3>{title}</h3><div class="strips{dense}">{"".join(cells)}</div></div>')
    return (
        "<section><h2>Ranges by module</h2>"
        '<p class="soft">The sizes that values have in float32, by power of two, modules in program order. '
        f"Stronger colour: more of the values. {_limits_text(half[0][0]) if half else ''}</p>"
        '<div class="legend"><span><i style="--key:var(--normal)"></i>fits</span>'
        '<span><i style="--key:var(--subnormal)"></i>subnormal: loses digits</span>'
        '<span><i style="--key:var(--zero)"></i>too small: zero</span>'
        '<span><i style="--key:var(--overflow)"></i>too large: inf</span></div>'
        f'<div class="charts">{"".join(panels)}</div></section>'
    )


def _name(path: str) -> str:
    """A path that may go on in the next line after each slash."""
    return html.escape(path or "(no module)").replace("/", "/<wbr>")


def _by_path(d: Diagnosis) -> tuple[list[str], dict[tuple[str, str], Row]]:
    """Module paths in program order of the forward pass, what is outside of them last; the row of each direction."""
    ordered = sorted(d.table, key=lambda row: (not row.path, row.direction != "forward"))
    return list(dict.fromkeys(row.path for row in ordered)), {(r.path, r.direction): r for r in d.table}


def _window(table: Iterable[Row]) -> tuple[int, int]:
    """The exponents to draw: all that occur, and float16's range with some room."""
    seen = [e for row in table if row.exponents for e in row.exponents]
    return max(min([*seen, -27]), EXPONENTS.start), min(max([*seen, 18]) + 1, EXPONENTS.stop)


@functools.cache
def _limits(dtype: np.dtype) -> tuple[int, int, int]:
    """Exponents of the smallest subnormal, of the smallest normal, and of the first power of two that is inf."""
    band = float_range(dtype)
    return (
        round(math.log2(band.smallest_subnormal)),
        round(math.log2(band.smallest_normal)),
        math.ceil(math.log2(band.largest)),
    )


def _limits_text(dtype: np.dtype) -> str:
    zero, subnormal, overflow = (f"2<sup>{e}</sup>" for e in _limits(dtype))
    beyond = " (beyond this picture)" if _limits(dtype)[1] < EXPONENTS.start else ""
    return (
        f"{dtype.name} is inf from {overflow}, has fewer digits below {subnormal} and nothing but zero below "
        f"{zero}{beyond}."
    )


def _axis(limits: tuple[int, int, int] | None, low: int, high: int) -> str:
    """Labels of the limits, and of the ends where there is room; on a narrow screen fewer."""
    zero, subnormal, overflow = limits or (low, 0, high)
    placed: dict[int, bool] = {}
    for exponent in (overflow, subnormal, zero, low, high):
        room = min((abs(exponent - other) / (high - low) for other in placed), default=1.0)
        if low <= exponent <= high and room >= 0.16:
            placed[exponent] = room >= 0.26
    marks = []
    for exponent in sorted(placed):
        side = {low: "first", high: "last"}.get(exponent, "") + ("" if placed[exponent] else " wide")
        marks.append(f'<b class="{side}" style="left:{_share(exponent, low, high)}%">2<sup>{exponent}</sup></b>')
    return f'<div class="axis">{"".join(marks)}</div>'


def _strip(row: Row, low: int, high: int) -> str:
    is_half = row.dtype in HALF
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


# Curves


def _errors(d: Diagnosis) -> str:
    """Relative error by module, carried on and own, forward and backward."""
    paths, rows = _by_path(d)
    values = [e for row in d.table for e in (row.error, row.own_error) if e and math.isfinite(e)]
    low = max(math.floor(math.log10(min(values, default=1e-4))), -12)
    high = max(math.ceil(math.log10(max(values, default=1.0))), low + 1)
    isolated = any(row.own_error is not None for row in d.table)
    half = [float_range(row.dtype).epsilon / 2 for row in d.table if row.dtype in HALF]
    panels = []
    for direction in ("forward", "backward"):
        found = [(i, rows[path, direction]) for i, path in enumerate(paths) if (path, direction) in rows]
        if not found:
            continue
        if direction == "backward":
            found.reverse()
        width = len(paths)
        at = {i: (i if direction == "forward" else width - 1 - i) + 0.5 for i, _ in found}
        finite = [(i, row) for i, row in found if not row.non_finite]
        curves = [("carried", [(at[i], _log10(row.error, low)) for i, row in finite])]
        if isolated:
            curves.append(("own", [(at[i], _log10(row.own_error, low)) for i, row in found]))
        lines = [_level(math.log10(max(half)), width, low, high)] if half else []
        lines += [_line(kind, points, low, high) + _dots(kind, points, low, high) for kind, points in curves]
        lines.append(_dots("lost", [(at[i], high) for i, row in found if row.non_finite], low, high))
        numbers = (1, width) if direction == "forward" else (width, 1)
        ends = [f'<b class="{side}" style="left:{x}%">module {n}</b>' for side, x, n in
                zip(("first", "last"), (0, 100), numbers, strict=True)][: width]  # fmt: skip
        axis = f'<div class="axis">{"".join(ends)}</div>'
        ticks = [(e, f"10<sup>{e}</sup>") for e in _steps(low, high)]
        title = "Forward, in program order" if direction == "forward" else "Backward, from the loss to the input"
        panels.append(f"<div><h3>{title}</h3>{_plot(ticks, low, high, width, ''.join(lines), axis)}</div>")
    own = '<span class="own"><i></i>its own, given float32\'s inputs</span>' if isolated else ""
    note = "" if isolated else " What each module adds by itself was not measured."
    lost = '<span class="lost"><i></i>some results are inf or nan</span>' if any(r.non_finite for r in d.table) else ""
    return (
        '<section><h2>Error by depth</h2><p class="soft">Relative error of a module\'s results (Euclidean norm); '
        f"numbers are those above; what is exact lies on the bottom line.{note}</p>"
        f'<div class="legend"><span class="carried"><i></i>with earlier errors</span>{own}{lost}'
        '<span style="--key:var(--soft)"><i class="dash"></i>one rounding to half precision</span></div>'
        f'<div class="charts">{"".join(panels)}</div></section>'
    )


def _scales(scales: Sequence[ScaleStep]) -> str:
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
    ticks = [(e, f"2<sup>{e}</sup>") for e in _steps(low, high)]
    plot = _plot(ticks, low, high, width, lines, f'<div class="axis">{ends}</div>')
    return (
        '<section><h2>Loss scale over the run</h2><div class="legend"><span class="carried"><i class="line"></i>loss '
        f'scale</span><span class="lost"><i></i>skipped ({len(skipped)} of {len(scales)} shown steps)</span></div>'
        f'<div class="charts one"><div>{plot}</div></div></section>'
    )


def _plot(ticks: list[tuple[int, str]], low: float, high: float, width: float, lines: str, axis: str) -> str:
    """Curves with an axis at the left and one below; the picture stretches, its text does not."""
    labels = "".join(f'<span style="bottom:{_share(y, low, high)}%">{text}</span>' for y, text in ticks)
    grid = "".join(f'<path class="grid" d="M0 {high - y:g}h{width:g}"/>' for y, _ in ticks)
    view = f"0 0 {width:g} {high - low:g}"
    return (
        f'<div class="plot"><div class="ticks">{labels}</div><div class="chart">'
        f'<svg viewBox="{view}" preserveAspectRatio="none" overflow="visible">{grid}{lines}</svg></div>'
        f"<span></span>{axis}</div>"
    )


def _line(kind: str, points: Sequence[tuple[float, float]], low: float, high: float) -> str:
    return f'<path class="curve {kind}" d="M{"L".join(_place(points, low, high))}"/>' if points else ""


def _dots(kind: str, points: Sequence[tuple[float, float]], low: float, high: float) -> str:
    """Round whatever the stretching: ends of lines without length."""
    many = " many" if len(points) > _DENSE else ""
    places = "".join(f"M{place}h0" for place in _place(points, low, high))
    return f'<path class="dots {kind}{many}" d="{places}"/>' if points else ""


def _level(y: float, width: float, low: float, high: float) -> str:
    return f'<path class="dash" d="M0 {high - y:g}h{width:g}"/>' if low <= y <= high else ""


def _place(points: Sequence[tuple[float, float]], low: float, high: float) -> Iterator[str]:
    return (f"{x:g} {high - min(max(y, low), high):.4g}" for x, y in points)


def _log10(error: float | None, low: int) -> float:
    return math.log10(error) if error and math.isfinite(error) else low


def _steps(low: int, high: int) -> range:
    """At most six whole numbers from `low` to `high`, evenly apart."""
    return range(low, high + 1, -(-(high - low) // 5) or 1)


# Lists


def _flushed(d: Diagnosis) -> str:
    flushed = d.flushed
    if not flushed:
        return ""
    note = "" if math.isfinite(d.loss[0]) else " The loss is not finite, so neither is what they are taken from."
    worst = sorted(((share, name) for name, share in flushed.items() if share > 0), reverse=True)
    head = "<h2>Gradient flushed to zero</h2>"
    if not worst:
        none = f"No gradient value of any of {len(flushed)} parameters is lost."
        return f'<section>{head}<p class="soft">{none}</p></section>'
    bars = [
        f'<span>{_name(name)}</span><div><i style="width:{100 * share:.4g}%"></i></div><b>{percent(share)} %</b>'
        for share, name in worst[:20]
    ]
    shown = f"the worst 20 of {len(worst)}" if len(worst) > 20 else f"all {len(worst)}"
    return (
        f'<section>{head}<p class="soft">Share of a gradient\'s values that are zero in half precision and not in '
        f"float32: {shown} parameters that lose any, of {len(flushed)}.{note}</p>"
        f'<div class="bars">{"".join(bars)}</div></section>'
    )


def _table(d: Diagnosis) -> str:
    if not d.table:
        return ""
    heads = "".join(f'<th scope="col"><button>{name}</button></th>' for name in COLUMNS)
    rows = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in d.worst)
    opened = " open" if len(d.table) <= 2 * _DENSE else ""
    return (
        f"<section><details{opened}><summary>All {len(d.table)} rows, most harm first</summary>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></details></section>"
    )


def _cells(row: Row) -> Iterator[str]:
    own = -1.0 if row.own_error is None else row.own_error
    highest = -999 if row.exponents is None else row.exponents[1]
    error = "Infinity" if row.non_finite else row.error
    values = [
        row.path, row.direction, row.dtype.name, highest, row.overflow, row.underflow, row.subnormal, error, own
    ]  # fmt: skip
    for name, text, value in zip(COLUMNS, row_texts(row), values, strict=True):
        hurt = ' class="hurt"' if name in ("overflow %", "underflow %") and value else ""
        shown = html.escape(text.replace("..", " to ") if name == "log2 range" else text)
        yield f'<td{hurt} data-name="{name}" data-value="{html.escape(str(value))}">{shown}</td>'


def _share(value: float, low: float, high: float) -> str:
    return f"{100 * (value - low) / (high - low):.4g}"


def _number(value: float) -> str:
    return f"{value:.6g}"
