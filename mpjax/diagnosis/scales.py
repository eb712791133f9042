"""Searches for a loss scale with which a half-precision step is healthy."""

import math
from collections.abc import Callable

from mpjax.diagnosis.emulate import Emulator, everywhere
from mpjax.diagnosis.formats import NARROW
from mpjax.diagnosis.health import Reference, all_finite, is_repaired, outputs_of
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import Reading, Site
from mpjax.diagnosis.trace import Trace, emulated


_ROOM = 2.0**-4
"""A smaller loss scale is reduced by this factor once more, because the next batch may have larger gradients."""


def lower_scale(
    reference: Reference, program: Program, scale: float, rounds: Callable[[str], bool] = everywhere
) -> float | None:
    """Finds a smaller loss scale, at least 1, with which a step is healthy; None if there is none.

    It is `_ROOM` (1/16) times the largest healthy power of two below `scale`, because the next batch may have larger
    gradients. If that is below 1 or not healthy, it is the largest healthy power of two itself.

    Args:
      reference: the float32 step to compare with.
      program: the step.
      scale: the loss scale of the step.
      rounds: the modules that round, as in `Emulator`.
    """
    lower = healthy_scale(reference, program, scale, 0.5, rounds)
    if lower is None or lower * _ROOM < 1 or not is_repaired(reference, program, lower * _ROOM, rounds):
        return lower
    return lower * _ROOM


def healthy_scale(
    reference: Reference, program: Program, scale: float, factor: float, rounds: Callable[[str], bool] = everywhere
) -> float | None:
    """Searches other loss scales for the first with which the step is healthy; None if there is none.

    The search multiplies by `factor` again and again. With a factor below 1, it starts from `scale` rounded up to a
    power of two, and ends at 1. With a factor above 1, it starts from `scale` rounded down, and ends at 2^24. The
    starting scale itself is not tried, nor are scales below 1.

    Args:
      reference: the float32 step to compare with.
      program: the step.
      scale: the loss scale of the step.
      factor: a power of two other than 1.
      rounds: the modules that round, as in `Emulator`.
    """
    exponent = math.log2(scale)
    other = 2.0 ** math.ceil(exponent) if factor < 1 else max(2.0 ** math.floor(exponent), 1 / factor)
    while (other := other * factor) >= 1 and (factor < 1 or other <= 2.0**24):
        if is_repaired(reference, program, other, rounds):
            return other
    return None


def scale_beside_rules(reference: Reference, program: Program, trace: Trace, scale: float) -> float | None:
    """Finds a lower loss scale for a step that overflows in both the forward and the backward pass.

    The step is healthy with this scale once the modules that overflow in the forward pass are in float32.

    Returns:
      The loss scale. None if the step with these modules in float32 is finite with its own scale, or if no lower scale
      is healthy.
    """
    kept: set[str] = set()

    def rounds(path: str) -> bool:
        return path not in kept

    while True:
        entries = zip(trace.sites, trace.readings, strict=True)
        over = {site.path for site, reading in entries if site.direction == "forward" and _is_over(site, reading)}
        if over <= kept:  # the overflows that remain are in the backward pass
            return lower_scale(reference, program, scale, rounds)
        kept |= over
        if all_finite(outputs_of(Emulator(rounds=rounds, reference=False), program, scale)):
            return None
        trace = emulated(program, scale, rounds=rounds)


def _is_over(site: Site, reading: Reading) -> bool:
    """True if a half-precision result overflows, or is not finite although its operands are."""
    return site.dtype in NARROW and (reading.overflow > 0 or reading.begins > 0)
