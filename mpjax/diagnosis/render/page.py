"""Renders a diagnosis as one HTML page that needs no network: verdict, advice, plots and table."""

import html
import math
import pathlib
import re
import string
from collections.abc import Iterator, Sequence

from mpjax.diagnosis.facts import Facts, ScaleStep
from mpjax.diagnosis.render.curves import DENSE, by_path, errors, name_of, scales_of
from mpjax.diagnosis.render.ranges import range_strips
from mpjax.diagnosis.render.text import columns_of, percent, row_texts
from mpjax.diagnosis.trace import Row


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
    """Returns the HTML page of a diagnosis.

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
    return template.substitute(title=title, body="\n".join(filter(None, sections)))


def _verdict(d: Facts) -> str:
    tone, word, usual = _VERDICTS[d.verdict]
    headline = d.reason or usual
    if d.path is not None:
        headline = f"{headline}: {d.path or 'outside of all modules'}"
    where = "optimizer's update" if d.direction == "update" else f"{d.direction} pass" if d.direction else None
    place = [where, d.operation, d.source]
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
        f'<p class="soft">{html.escape(" · ".join(filter(None, place)))}</p><p>{html.escape(d.evidence)}</p><dl>'
        + "".join(f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in facts.items())
        + "</dl></section>"
    )


def _advice(d: Facts) -> str:
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
        share = f" {moved} of the FLOPs of matrix products and convolutions move to float32." if d.rules else ""
        lines = [f"<p>{proof}{share}</p>"] if d.rules else lines
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
    flushed = d.flushed
    if not flushed:
        return ""
    finite = math.isfinite(d.loss[0]) and not any(row.non_finite for row in d.table if row.direction == "backward")
    note = "" if finite else " Some gradients are not finite: their shares mean nothing."
    worst = sorted(((share, name) for name, share in flushed.items() if share > 0), reverse=True)
    head = "<h2>Gradient flushed to zero</h2>"
    if not worst:
        none = (
            f"No gradient value underflows to zero in any of {len(flushed)} parameters."
            if finite
            else "The gradients are not finite in half precision, so their underflow cannot be measured."
        )
        return f'<section>{head}<p class="soft">{none}</p></section>'
    bars = [
        f'<span>{name_of(name)}</span><div><i style="width:{100 * share:.4g}%"></i></div><b>{percent(share)} %</b>'
        for share, name in worst[:20]
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


def _cells(row: Row, columns: tuple[str, ...]) -> Iterator[str]:
    own = -1.0 if row.own_error is None else row.own_error
    highest = -999 if row.exponents is None else row.exponents[1]
    error = "Infinity" if row.non_finite else row.error
    values = [
        *(row.path, row.direction, row.dtype.name, highest, row.overflow, row.underflow, row.subnormal, error, own),
        999 if row.sqnr is None else row.sqnr,
    ]
    for name, text, value in zip(columns, row_texts(row, columns), values, strict=False):
        hurt = ' class="hurt"' if name in ("overflow %", "underflow %") and value else ""
        shown = html.escape(text.replace("..", " to ") if name == "log2 range" else text)
        yield f'<td{hurt} data-name="{name}" data-value="{html.escape(str(value))}">{shown}</td>'


def _number(value: float) -> str:
    return f"{value:.6g}"
