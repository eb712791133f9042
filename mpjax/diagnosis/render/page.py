"""Renders a diagnosis as one HTML page that needs no network: verdict, advice, plots and table."""

import functools
import html
import math
import pathlib
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from mpjax import notebook
from mpjax.diagnosis.facts import Facts, ScaleStep
from mpjax.diagnosis.formats import NARROW, range_of
from mpjax.diagnosis.readings import EXPONENTS
from mpjax.diagnosis.render.curves import DENSE, by_path, errors, name_of, percent_of, scales_of
from mpjax.diagnosis.render.text import COLUMNS, columns_of, percent, row_texts
from mpjax.diagnosis.trace import TraceRow
from mpjax.errors import printable


_TEMPLATE = pathlib.Path(__file__).with_name("page.html")

_VERDICTS = {
    "healthy": ("good", "Healthy", "Precision is not a problem here"),
    "overflow": ("bad", "Overflow", "Values too large for half precision"),
    "underflow": ("bad", "Underflow", "Values too small for half precision become zero"),
    "rounding": ("bad", "Rounding", "Too few digits for this computation"),
    "loss_scale": ("bad", "Loss scale", "The loss scale is too high"),
    "not_precision": ("other", "Not precision", "No choice of dtypes repairs it"),
}

_FLAG = re.compile(r"--[\w.]*\w")


def page_of(diagnosis: Facts, scales: Sequence[ScaleStep] = ()) -> str:
    """Renders the HTML page of a diagnosis. Control characters are escaped.

    Args:
      diagnosis: the diagnosis to show.
      scales: the loss scale of a run by step; plotted if not empty.
    """
    sections = [_verdict(diagnosis), _advice(diagnosis)]
    if diagnosis.table:
        sections += [range_strips(diagnosis), errors(diagnosis)]
    sections += [_flushed(diagnosis), scales_of(scales), _table(diagnosis)]
    title = html.escape(f"{_VERDICTS[diagnosis.verdict][1]}: mpjax diagnosis")
    template = string.Template(_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=title, body=printable("\n".join(filter(None, sections))))


def _verdict(d: Facts) -> str:
    tone, word, usual = _VERDICTS[d.verdict]
    headline = d.reason or usual
    if d.path is not None:
        headline = f"{headline}: {d.path or 'outside of all modules'}"
    where = "optimizer's update" if d.direction == "update" else f"{d.direction} pass" if d.direction else None
    location = [where, d.operation, d.source]
    wide, low = d.loss[1], d.loss[0]
    facts = {
        "Loss in half precision": _number(low),
        "Loss in float32": _number(wide),
        "Relative difference": "none" if low == wide else f"{abs(low - wide) / abs(wide):.2g}" if wide else "-",
        "Loss scale": f"{d.loss_scale:.10g}",
        "Modules": str(len(set(by_path(d)[0]) - {""})),
        "Policy": d.policy.replace(",", ", ").replace(";", "; "),
    }
    if not math.isfinite(low) or not math.isfinite(wide):
        del facts["Relative difference"]
    return (
        f'<section class="verdict {tone}"><span class="kicker">{word}</span><h1>{html.escape(headline)}</h1>'
        f'<p class="soft">{html.escape(" · ".join(filter(None, location)))}</p><p>{html.escape(d.evidence)}</p><dl>'
        + "".join(f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in facts.items())
        + "</dl></section>"
    )


def _advice(d: Facts) -> str:
    """The HTML section with the advice, and with the change as text to copy if there is one; empty without either.

    If the change has rules, a sentence says whether it was verified, and its FLOPs, in place of the first advice.
    """
    if not d.toml and not d.advice:
        return ""
    lines = [f"<p>{_FLAG.sub(_as_code, html.escape(line))}</p>" for line in d.advice]
    if d.toml:
        proof = (
            "A run with this change is healthy."
            if d.verified
            else "Not verified: a run with this change is not healthy."
        )
        moved = f"{d.float32_flops:.1%}" if d.float32_flops else "None"
        moved_text = f" {moved} of the FLOPs of matrix products and convolutions move to float32." if d.rules else ""
        if d.rules:  # the first line has them, as the text to copy does
            lines[:1] = [f"<p>{proof}{moved_text}</p>"]
        pasted = {
            "In a config file": d.toml,
            "Or on the command line": d.flags,
            "Or in your own code, as the policy": d.repaired_policy,
        }
        for name, text in ((name, text) for name, text in pasted.items() if text):
            broken = "<wbr>".join(map(html.escape, re.split("(?<=[,;])", text)))  # a policy has no spaces to break at
            lines.append(f'<div class="copy"><h3>{name}</h3><button>copy</button></div><pre>{broken}</pre>')
    return f"<section><h2>What to change</h2>{''.join(lines)}</section>"


def _as_code(match: re.Match) -> str:
    return f"<code>{match[0]}</code>"


def _flushed(d: Facts) -> str:
    """The HTML section with the 20 gradients that lose most values to zero, as bars; empty without gradients."""
    flushed = d.flushed
    if not flushed:
        return ""
    finite = math.isfinite(d.loss[0]) and not any(row.non_finite for row in d.table if row.direction == "backward")
    note = "" if finite else " Some gradients are not finite: their shares mean nothing."
    worst = sorted(((lost, name) for name, lost in flushed.items() if lost > 0), reverse=True)
    head = "<h2>Gradient flushed to zero</h2>"
    if not worst:
        none = (
            f"No gradient value underflows to zero in any of {len(flushed)} parameters."
            if finite
            else "The gradients are not finite in half precision, so their underflow cannot be measured."
        )
        return f'<section>{head}<p class="soft">{none}</p></section>'
    bars = [
        f'<span>{name_of(name)}</span><div><i style="width:{100 * lost:.4g}%"></i></div><b>{percent(lost)} %</b>'
        for lost, name in worst[:20]
    ]
    shown = f"the worst 20 of {len(worst)}" if len(worst) > 20 else f"all {len(worst)}"
    return (
        f'<section>{head}<p class="soft">Share of a gradient\'s values that are zero in half precision but not in '
        f"float32. Shown: {shown} affected parameters, of {len(flushed)} in total.{note}</p>"
        f'<div class="bars">{"".join(bars)}</div></section>'
    )


def _table(d: Facts) -> str:
    if not d.table:
        return ""
    columns = columns_of(d)
    heads = "".join(f'<th scope="col"><button>{name}</button></th>' for name in columns)
    rows = "".join(f"<tr>{''.join(_cells(row, columns))}</tr>" for row in d.worst)
    opened = " open" if len(d.table) <= 2 * DENSE else ""
    return (
        f"<section><details{opened}><summary>All {len(d.table)} rows, worst first</summary>"
        '<p class="soft">Shares are of all half-precision results of a module in one direction together.</p>'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></details></section>"
    )


def _cells(row: TraceRow, columns: tuple[str, ...]) -> Iterator[str]:
    """Yields the HTML of each cell of a row. The attribute `data-value` has the number by which the page sorts."""
    local = -1.0 if row.own_error is None else row.own_error
    highest = -999 if row.exponents is None else row.exponents[1]
    error = "Infinity" if row.non_finite else row.error
    values = [
        *(row.path, row.direction, row.dtype.name, highest, row.overflow, row.underflow, row.subnormal, error, local),
        999 if row.sqnr is None else row.sqnr,
    ]
    for name, text, value in zip(columns, row_texts(row, columns), values, strict=False):
        hurt = ' class="hurt"' if name in ("overflow %", "underflow %") and value else ""
        shown = html.escape(text.replace("..", " to ") if name == "log2 range" else text)
        yield f'<td{hurt} data-name="{name}" data-value="{html.escape(str(value))}">{shown}</td>'


def _number(value: float) -> str:
    return f"{value:.6g}"


def range_strips(d: Facts) -> str:
    """Plots the histogram of each module and direction as a coloured strip, in an HTML section.

    A strip shows how many of the results in float32 have each base-2 exponent. Each parameter's update that was checked
    has a strip too.
    """
    paths, rows = by_path(d)
    low, high = _window(d.table)
    half = Counter(row.dtype for row in d.table if row.dtype in NARROW).most_common(1)
    limits = _limits(half[0][0]) if half else None
    updates = {(row.path, row.direction): row for row in d.table if row.direction == "update"}

    def panel(title: str, direction: str, paths: Sequence[str], rows: Mapping[tuple[str, str], TraceRow]) -> str:
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


def _window(table: Iterable[TraceRow]) -> tuple[int, int]:
    """The first base-2 exponent to draw, and the exponent after the last.

    They cover all exponents that occur, and at least the range of float16 with a margin, but nothing outside of
    `EXPONENTS`.
    """
    exponents = [e for row in table if row.exponents for e in row.exponents]
    return max(min([*exponents, -27]), EXPONENTS.start), min(max([*exponents, 18]) + 1, EXPONENTS.stop)


@functools.cache
def _limits(dtype: np.dtype) -> tuple[int, int, int]:
    """The base-2 exponents of the smallest subnormal, the smallest normal, and the first power of two that is inf."""
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
    """Draws the labels of a dtype's limits, as in `_limits`, and of the ends of the plot if there is room.

    `high` is the exponent after the last of the plot. If `limits` is None, 2^0 takes the place of the limits. Labels
    that are close to others get the class `wide`, and are hidden on a small screen.
    """
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


def _strip(row: TraceRow, low: int, high: int) -> str:
    """Draws the histogram of a row as SVG, from exponent `low` to below `high`. The tooltip has the row's numbers."""
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
    paths = [f'<path class="{kind}" opacity="{level / 4:g}" d="{d}"/>' for (kind, level), d in cells.items()]
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
        f"<title>{title}</title>{band}{''.join(paths)}{lines}</svg>"
    )


_ROWS = 20


def cell_of(facts: Facts) -> str:
    """Renders a diagnosis as HTML for a notebook: verdict, evidence, advice, text to paste, and the 20 worst rows.

    The text to paste is TOML and the repaired policy, if there are any.
    """
    shown, columns = facts.worst[:_ROWS], columns_of(facts)
    left_out = len(facts.table) - len(shown)
    location = [f"at {facts.source}"] if facts.source else []
    pasted = "\n\n".join(filter(None, [facts.toml, facts.repaired_policy]))
    return notebook.block(
        notebook.heading(facts.headline),
        notebook.paragraphs([*location, facts.evidence, *facts.advice]),
        notebook.verbatim(pasted) if pasted else "",
        notebook.table(columns, [row_texts(row, columns) for row in shown]) if shown else "",
        notebook.paragraphs(
            [f"{left_out} rows with less harm are left out; to_html(file) has all."] if left_out else []
        ),
    )
