"""What the pictures of a diagnosis's page share: which module comes when, how its name breaks, where a value lies."""

import html

from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.rows import Row


DENSE = 40
"""Modules from which their rows are set smaller."""


def name_of(path: str) -> str:
    """A path that may go on in the next line after each slash."""
    return html.escape(path or "(no module)").replace("/", "/<wbr>")


def by_path(d: Diagnosis) -> tuple[list[str], dict[tuple[str, str], Row]]:
    """Module paths in program order of the forward pass, what is outside of them last; the row of each direction.

    Rows of the optimizer's update, which have paths of parameters, are left out.
    """
    rows = [row for row in d.table if row.direction != "update"]
    ordered = sorted(rows, key=lambda row: (not row.path, row.direction != "forward"))
    return list(dict.fromkeys(row.path for row in ordered)), {(row.path, row.direction): row for row in rows}


def percent_of(value: float, low: float, high: float) -> str:
    """Where a value lies between two others, as CSS has it."""
    return f"{100 * (value - low) / (high - low):.4g}"
