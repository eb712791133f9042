"""The dtypes that a policy gave the submodules of a model, printed as a table."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mpjax import notebook


class PolicyRow(NamedTuple):
    """The dtypes of one submodule.

    Attributes:
      path: attribute names and indices joined by `/`; empty for the model itself.
      type: the name of its class.
      param_dtype: the dtype of its own parameters; None if it has none.
      compute_dtype: the dtype that it computes in; the float8 dtype if its product with a weight is in float8; None if
        it has no `dtype` to set and no rule, so that its own code decides.
      rule: the pattern that decided; "policy" if no rule did.
    """

    path: str
    type: str
    param_dtype: np.dtype | None
    compute_dtype: np.dtype | None
    rule: str


class PolicyReport(tuple[PolicyRow, ...]):
    """What `apply_policy` did: a tuple of rows that prints as a table, with notes about the exceptions below it.

    Attributes:
      notes: a line for each `dtype` or `param_dtype` attribute that stays unchanged because it is not a floating dtype,
        for each layer that cannot multiply in float8, for a rule for `Linear` in a model with `LinearGeneral`, and for
        a rule that names a module with variables, but no `dtype` and no `__call__`.
    """

    notes: tuple[str, ...]

    def __new__(cls, rows: Iterable[PolicyRow], notes: Iterable[str] = ()):
        """Creates a report of `rows`, with one line of text below the table for each of `notes`."""
        report = super().__new__(cls, rows)
        report.notes = tuple(notes)
        return report

    def _cells(self) -> list[list[str]]:
        return [[str(value or "-") for value in row] for row in self]

    def _repr_html_(self) -> str:
        return notebook.block(notebook.table(PolicyRow._fields, self._cells()), notebook.paragraphs(self.notes))

    _repr_pretty_ = notebook.as_text

    def __str__(self) -> str:
        cells = [PolicyRow._fields, *self._cells()]
        widths = [max(len(row[column]) for row in cells) for column in range(len(PolicyRow._fields))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], *self.notes])
