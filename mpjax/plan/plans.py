"""What a plan found: values for JSON, and tables in a notebook."""

from collections.abc import Mapping, Sequence
from typing import Any

from mpjax import notebook
from mpjax.plan.estimate import Estimate
from mpjax.plan.float8_report import comparisons
from mpjax.plan.table import rows, title


class Plans(dict[str, Any]):
    """The result of `plan_run`: a dict of what `--json` prints, which a notebook shows as a table for each kind of GPU.

    Attributes:
      estimates: the plans, grouped by GPU.
    """

    estimates: tuple[Estimate, ...]

    def __init__(self, found: Mapping[str, Any], estimates: Sequence[Estimate]):
        super().__init__(found)
        self.estimates = tuple(estimates)

    def _repr_html_(self) -> str:
        parts = []
        for gpu in dict.fromkeys(plan.gpu for plan in self.estimates):
            own = [plan for plan in self.estimates if plan.gpu == gpu]
            heads = ["per step and GPU", *(plan.title for plan in own)]
            table = notebook.table(heads, [[label, *cells] for label, cells in rows(own)])
            parts += [notebook.heading(title(own)), table, notebook.paragraphs(comparisons(own))]
        return notebook.block(*parts)
