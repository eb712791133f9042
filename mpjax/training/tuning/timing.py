"""Times two programs side by side, and derives float32 rules from timings."""

import glob
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from mpjax.precision.policy_report import PolicyReport
from mpjax.precision.rules import NORM, covers, scope_lineage
from mpjax.training.tuning.products import is_in


ROUNDS = 9
"""Number of timings of each program."""

SHORTEST = 0.004
"""Shortest duration of a timing in seconds; shorter programs run several times per timing."""

MARGIN = 0.1
"""Half precision is slower if float32 is faster by this share in at least three quarters of the rounds."""

GAIN = 0.01
"""Rules are kept if they make a step faster by this share in at least three quarters of the rounds."""


class Timing(NamedTuple):
    """Seconds per run of two programs, one number for each round.

    Attributes:
      half: seconds of the program in half precision, or of the step without the rules.
      full: seconds of the program in float32, or of the step with the rules.
    """

    half: tuple[float, ...]
    full: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The time of the first program divided by that of the second, the median over the rounds."""
        return statistics.median(self._ratios)

    def faster_by(self, margin: float) -> bool:
        """True if the second is faster by more than `margin` in at least three quarters of the rounds."""
        return statistics.quantiles(self._ratios, n=4, method="inclusive")[0] > 1 + margin

    @property
    def _ratios(self) -> list[float]:
        return [half / full for half, full in zip(self.half, self.full, strict=True)]


def side_by_side(half: Callable[[], Any], full: Callable[[], Any], rounds: int = ROUNDS) -> Timing:
    """Measures the run times of two functions that return arrays, alternating, after a warm-up run of each."""
    for run in (half, full):
        _seconds(run, 1)
    repeats = [max(1, math.ceil(SHORTEST / max(_seconds(run, 1), 1e-7))) for run in (half, full)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            run = (half, full)[which]
            seconds[which].append(_seconds(run, repeats[which]) / repeats[which])
    return Timing(tuple(seconds[0]), tuple(seconds[1]))


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    results = None
    for _ in range(repeats):
        results = run()
    jax.block_until_ready(results)
    return time.perf_counter() - start


class Timed(NamedTuple):
    """Modules with equal programs, and their timing.

    Attributes:
      type: the name of their class.
      modules: their paths.
      timing: the forward and backward pass of one of them, in half precision and in float32.
    """

    type: str
    modules: tuple[str, ...]
    timing: Timing

    @property
    def slower_in_half(self) -> bool:
        """True if float32 is faster by more than `MARGIN` in at least three quarters of the rounds."""
        return self.timing.faster_by(MARGIN)


def rules_of(timed: Iterable[Timed], report: PolicyReport) -> dict[str, str]:
    """Chooses rules, pattern to "float32", that cover exactly the modules that are slower in half precision.

    Args:
      timed: the timed modules.
      report: the dtypes and the deciding rule of each module without these rules.
    """
    slow = {path for kind in timed if kind.slower_in_half for path in kind.modules}
    rest = [row.path for row in report if row.rule != NORM and not any(is_in(row.path, path) for path in slow)]
    patterns: list[str] = []
    for path in sorted(slow):
        if not any(_covers(pattern, path) for pattern in patterns):
            patterns.append(next(p for p in _candidates(path) if not any(_covers(p, other) for other in rest)))
    return dict.fromkeys(patterns, "float32")


def _candidates(path: str) -> Sequence[str]:
    """Patterns for a path, the widest first: its last name anywhere, as `*/depthwise`, then the path itself."""
    name = path.rpartition("/")[2]
    alone = glob.escape(path)
    return [alone] if name == path or name.isdecimal() else [f"*/{glob.escape(name)}", alone]


def _covers(pattern: str, path: str) -> bool:
    return covers(pattern, scope_lineage(path))
