"""Renders a diagnosis as plain text and for a terminal, and formats the numbers of its table."""

from mpjax.diagnosis.facts import Facts
from mpjax.diagnosis.trace import TraceRow


COLUMNS = (
    "path",
    "direction",
    "dtype",
    "log2 range",
    "overflow %",
    "underflow %",
    "subnormal %",
    "error",
    "own error",
)
"""The columns of every table."""

FLOAT8_COLUMN = "SQNR dB"
"""An additional column for values rounded to float8."""

# For rich: on a terminal of 80 columns these heads leave 14 for the path.
_HEADS = (
    "path",
    "direction",
    "dtype",
    "log2\nrange",
    "over-\nflow %",
    "under-\nflow %",
    "sub-\nnormal %",
    "error",
    "own\nerror",
    "SQNR\ndB",
)

_SHORT, _LONG = 5, 20  # rows of the table in plain text, in rich


def text_of(facts: Facts) -> str:
    """Formats a diagnosis as plain text: verdict, source line, evidence, advice, and the five most harmful rows.

    The rows are left out if the diagnosis has no table.
    """
    lines = [facts.headline, *([f"at {facts.source}"] if facts.source else []), facts.evidence, *facts.advice]
    worst = [columns_of(facts), *(row_texts(row, columns_of(facts)) for row in facts.worst[:_SHORT])]
    widths = [max(map(len, column)) for column in zip(*worst, strict=True)]
    for cells in worst if facts.table else []:
        words = [f"{c:<{w}}" if i < 3 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        lines.append("  ".join(words).rstrip())
    return "\n".join(lines)


def rich_of(facts: Facts):
    """Renders a diagnosis for rich: as `text_of`, with TOML and flags to paste, and a table of the worst 20 rows."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    color = "green" if facts.verdict == "healthy" else "yellow" if facts.verdict == "not_precision" else "red"
    renderables = [Text(facts.headline, style=f"bold {color}")]
    renderables += [Text(f"at {facts.source}", style="dim")] if facts.source else []
    renderables += [Text(line) for line in (facts.evidence, *facts.advice)]
    if facts.toml:
        renderables += [Padding(Text(facts.toml), (1, 2, 0, 2)), Padding(Text(facts.flags), (1, 2))]
    shown = facts.worst[:_LONG]
    note = f"the worst {len(shown)} of {len(facts.table)} rows" if len(facts.table) > _LONG else None
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", caption=note)
    columns = columns_of(facts)
    for number, name in enumerate(_HEADS[: len(columns)]):
        justify = "left" if number < 3 else "right"
        table.add_column(name, justify=justify, vertical="bottom", overflow="fold", no_wrap=number > 0)
    for row in shown:
        table.add_row(*map(Text, row_texts(row, columns)))
    return Group(*renderables, table)


def row_texts(row: TraceRow, columns: tuple[str, ...] = COLUMNS) -> tuple[str, ...]:
    """Formats a row of the table as one text for each column.

    The error is "inf" if some results are inf or nan. A number that was not measured is "-".

    Args:
      row: the row.
      columns: `COLUMNS`, or with one more for float8, as in `columns_of`.
    """
    texts = (
        row.path or "(no module)",
        row.direction,
        row.dtype.name,
        "all zero" if row.exponents is None else "{}..{}".format(*row.exponents),
        *map(percent, (row.overflow, row.underflow, row.subnormal)),
        "inf" if row.non_finite else error_text(row.error),
        "-" if row.own_error is None else error_text(row.own_error),
        "-" if row.sqnr is None else f"{row.sqnr:.1f}",
    )
    return texts[: len(columns)]


def columns_of(facts: Facts) -> tuple[str, ...]:
    """The column names of a diagnosis's table.

    The column for float8 is included only if a value is rounded to float8.
    """
    return (*COLUMNS, FLOAT8_COLUMN) if any(row.sqnr is not None for row in facts.table) else COLUMNS


def percent(fraction: float) -> str:
    """Formats a fraction in percent, without a sign: "0" for 0, "100" for 1, and "<0.01" to ">99.9" between them."""
    if fraction in (0.0, 1.0):
        return f"{fraction:.0%}"[:-1]
    if fraction < 1e-4:
        return "<0.01"
    return ">99.9" if fraction > 0.999 else f"{100 * fraction:.2f}" if fraction < 0.1 else f"{100 * fraction:.1f}"


def error_text(error: float) -> str:
    """Formats a relative error: "0", or two digits as in "1.2e-03"."""
    return "0" if error == 0 else f"{error:.1e}"
