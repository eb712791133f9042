"""From timings to rules: which modules stay in float32, in as few patterns as say it."""

import glob
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpjax.precision.modules import PolicyReport
from mpjax.precision.rules import NORM, covers, scope_lineage
from mpjax.training.tuning.products import is_in
from mpjax.training.tuning.timing import MARGIN, Timing


class Timed(NamedTuple):
    """Modules whose programs are equal, and how long they take.

    Attributes:
      type: their class's name.
      modules: their paths.
      timing: of one of them, forward and backward, in half precision and in float32.
    """

    type: str
    modules: tuple[str, ...]
    timing: Timing

    @property
    def slower_in_half(self) -> bool:
        """Whether half precision is slower by more than `MARGIN`, in three quarters of the rounds at least."""
        return self.timing.faster_by(MARGIN)


def rules_of(timed: Iterable[Timed], report: PolicyReport) -> dict[str, str]:
    """The rules that keep what is slower in half precision in float32, and nothing else: pattern to "float32".

    Args:
      timed: all modules that have products.
      report: what each module has without these rules.
    """
    slow = {path for one in timed if one.slower_in_half for path in one.modules}
    rest = [row.path for row in report if row.rule != NORM and not any(is_in(row.path, path) for path in slow)]
    patterns: list[str] = []
    for path in sorted(slow):
        if not any(_covers(pattern, path) for pattern in patterns):
            patterns.append(next(p for p in _candidates(path) if not any(_covers(p, other) for other in rest)))
    return dict.fromkeys(patterns, "float32")


def _candidates(path: str) -> Sequence[str]:
    """Patterns for a path, the widest first: by its last name anywhere, `*/depthwise`, and the path itself."""
    name = path.rpartition("/")[2]
    alone = glob.escape(path)
    return [alone] if name == path or name.isdecimal() else [f"*/{glob.escape(name)}", alone]


def _covers(pattern: str, path: str) -> bool:
    return covers(pattern, scope_lineage(path))
