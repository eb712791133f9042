"""Two programs side by side: how long each takes, turn and turn about, so that what slows the machine slows both."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


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
