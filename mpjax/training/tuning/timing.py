"""Two programs timed side by side, and the rules that timings speak for."""

import glob
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from mpjax.precision.modules import PolicyReport
from mpjax.precision.rules import NORM, covers, scope_lineage
from mpjax.training.tuning.products import is_in


ROUNDS = 9
"""How often each program is timed."""

SHORTEST = 0.004
"""Seconds that a timing takes at least; shorter programs run several times in it."""

MARGIN = 0.1
"""Half precision counts as slower where float32 is faster by this share, in three quarters of the rounds at least."""

GAIN = 0.01
"""Rules are kept that make a step faster by this share, in three quarters of the rounds at least."""


class Timing(NamedTuple):
    """Seconds per run, a number for each round.

    Attributes:
      half: of the program in half precision; of a step, without the rules.
      full: of the program in float32; of a step, with the rules.
    """

    half: tuple[float, ...]
    full: tuple[float, ...]

    @property
    def gain(self) -> float:
        """How many times as fast the second is, the median of the rounds."""
        return statistics.median(self._ratios)

    def faster_by(self, margin: float) -> bool:
        """Whether the second is faster by more than `margin` in three quarters of the rounds at least."""
        return statistics.quantiles(self._ratios, n=4, method="inclusive")[0] > 1 + margin

    @property
    def _ratios(self) -> list[float]:
        return [half / full for half, full in zip(self.half, self.full, strict=True)]


def side_by_side(half: Callable[[], Any], full: Callable[[], Any], rounds: int = ROUNDS) -> Timing:
    """Times two functions that return arrays, in turns, after each has run once."""
    for run in (half, full):
        _seconds(run, 1)
    repeats = [max(1, math.ceil(SHORTEST / max(_seconds(run, 1), 1e-7))) for run in (half, full)]
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            run = (half, full)[which]
            taken[which].append(_seconds(run, repeats[which]) / repeats[which])
    return Timing(tuple(taken[0]), tuple(taken[1]))


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    began = time.perf_counter()
    results = None
    for _ in range(repeats):
        results = run()
    jax.block_until_ready(results)
    return time.perf_counter() - began


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
