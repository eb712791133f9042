"""Another loss scale, with which a step in half precision is healthy."""

import math
from collections.abc import Callable

from mpjax.diagnosis.emulate import Emulator, everywhere
from mpjax.diagnosis.health import Reference, all_finite, is_repaired, outputs_of
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import Reading, Site
from mpjax.diagnosis.trace import Trace, run
from mpjax.precision.dtypes import HALF


_ROOM = 2.0**-4
"""A loss scale that was found by shrinking is shrunk by this once more: the next batch may pass one at the brink."""


def lower_scale(
    reference: Reference, program: Program, scale: float, rounds: Callable[[str], bool] = everywhere
) -> float | None:
    """A smaller loss scale, from 1, with which a step is healthy, and with room if there is some; None if none is.

    Args:
      reference: what the step is held against.
      program: the step.
      scale: its loss scale.
      rounds: as of `Emulator`.
    """
    lower = healthy_scale(reference, program, scale, 0.5, rounds)
    if lower is None or lower * _ROOM < 1 or not is_repaired(reference, program, lower * _ROOM, rounds):
        return lower
    return lower * _ROOM


def healthy_scale(
    reference: Reference, program: Program, scale: float, factor: float, rounds: Callable[[str], bool] = everywhere
) -> float | None:
    """The first power of two, from `scale` by a factor and between 1 and 2^24, with which the step is healthy."""
    other = 2.0 ** math.floor(math.log2(scale))
    if factor > 1:
        other = max(other, 1 / factor)
    while (other := other * factor) >= 1 and (factor < 1 or other <= 2.0**24):
        if is_repaired(reference, program, other, rounds):
            return other
    return None


def scale_beside_rules(reference: Reference, program: Program, trace: Trace, scale: float) -> float | None:
    """A loss scale for a step that overflows forward, with which it is healthy once those modules are in float32.

    Returns:
      None if the scale of the step is as good, or none is.
    """
    kept: set[str] = set()

    def rounds(path: str) -> bool:
        return path not in kept

    while True:
        seen = zip(trace.sites, trace.readings, strict=True)
        over = {site.path for site, reading in seen if site.direction == "forward" and _is_over(site, reading)}
        if over <= kept:  # what overflows now does so backward
            return lower_scale(reference, program, scale, rounds)
        kept |= over
        if all_finite(outputs_of(Emulator(rounds=rounds, reference=False), program, scale)):
            return None
        trace = run(program, scale, rounds=rounds)


def _is_over(site: Site, reading: Reading) -> bool:
    return site.dtype in HALF and (reading.overflow > 0 or reading.begins > 0)
