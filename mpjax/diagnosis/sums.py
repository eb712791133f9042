"""Finds sums of cotangents in half precision that make a gradient wrong, while the loss is right.

Only the derivative has these sums. If an operation reads a value many times, its derivative adds as many cotangents.
Examples are a gather, a broadcast, a window, a value with many uses, or a value that every step of a loop reads. The
sum has the dtype of the value.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from mpjax.diagnosis.emulate import Emulator, sums_of_cotangents
from mpjax.diagnosis.finding import Finding, named
from mpjax.diagnosis.formats import NARROW
from mpjax.diagnosis.health import Reference, loss_error, outputs_of
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import Reading, Site, ratio
from mpjax.diagnosis.trace import Trace, run
from mpjax.precision.casting.primitives import SUMS


_NOISE = 0.01
"""The relative error above which a sum is examined. A result that is rounded once has at most 0.004."""

_ADDITIONS = ("add", "add_any")
_LONG = 16
"""The number of terms from which single additions are examined as one sum."""


def lost_sum(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding | None:
    """Finds the sum of cotangents that makes a gradient wrong in a step whose loss is right; None if there is none.

    The sum is at fault if sums of cotangents in float32, each rounded once, reduce the error of the worst gradient to
    0.6 of its value or less.
    """
    error, tolerance = loss_error(trace.wide[0], trace.low[0]), reference.tolerance
    if error > tolerance or reference.without_float8 is not None or not long_sums(trace):
        return None
    strict = dataclasses.replace(reference, accepts=tolerance)
    errors = strict.lost_gradients(trace.low, scale)
    worst = max(errors, default=0.0)
    if worst <= tolerance:
        return None
    in_float32 = outputs_of(Emulator(reference=False, keeps=sums_of_cotangents), program, scale)
    left = max(strict.lost_gradients(in_float32, scale))
    if left > 0.6 * worst:
        return None
    alone = long_sums(run(program, scale, isolated=True))
    given = "with float32 inputs, " if alone else ""  # else the sum rounds little without the errors of its inputs
    site, reading = max(alone or long_sums(trace), key=lambda entry: entry[1].relative_error)
    wrong = program.parameter(errors.index(worst))
    evidence = (
        f"The step is finite and its loss has a relative error of {error:.2g}, but the gradient of {wrong} has one of "
        f"{worst:.2g}. It comes from {sum_in_words(site, program, trace)}: {given}its result has a relative error "
        f"of {reading.relative_error:.2g}. With sums of cotangents in float32, the gradient has one of "
        f"{left:.2g}."
    )
    return Finding("rounding", site, evidence, accepts=(worst + left) / 2)


def noted_sum(program: Program, trace: Trace, scale: float, reference: Reference) -> str:
    """A sentence about the sum of cotangents that loses most in a healthy step; empty if none loses much."""
    seen = [entry for entry in long_sums(trace) if _noise(entry[1]) > _NOISE]
    if not seen or max(reference.lost_gradients(trace.low, scale), default=0.0) <= _NOISE:
        return ""
    site, reading = max(seen, key=lambda entry: _noise(entry[1]))
    return f" Of the sums of cotangents, {sum_in_words(site, program, trace)}, loses most: {_noise(reading):.2g}."


def _noise(reading: Reading) -> float:
    return ratio(reading.noise, reading.exact)


def long_sums(trace: Trace) -> list[tuple[Site, Reading]]:
    """The sums of cotangents in half precision that may be wrong, with their readings.

    They are the sums with a rounding error above `_NOISE`, and the additions that are part of a sum of `_LONG` terms.
    """
    chains = _chains(trace.sites)
    return [
        (site, reading)
        for site, reading in zip(trace.sites, trace.readings, strict=True)
        if site.direction == "backward" and site.dtype in NARROW
        if (site.operation in SUMS and _noise(reading) > _NOISE)
        or max(site.terms * (site.operation in _ADDITIONS), chains[_kind(site)]) >= _LONG
    ]


def sum_in_words(site: Site, program: Program, trace: Trace) -> str:
    """Describes a sum: its number of terms, the value whose cotangents it adds, its dtype and its place."""
    terms = max(site.terms, _chains(trace.sites)[_kind(site)] + 1)
    parameters = [
        name
        for name, gradient in zip(program.gradients, trace.wide[1:], strict=True)
        if gradient.shape == site.shape and name.rpartition("/")[0] == site.path and name
    ]
    of = f"`{parameters[0]}`" if len(parameters) == 1 else f"a value of shape {list(site.shape)}"
    return f"the sum of {terms:,} cotangents of {of} in {site.dtype}, {named(site)}"


def _kind(site: Site) -> tuple:
    return site.operation, site.path, site.shape, site.direction


def _chains(sites: Sequence[Site]) -> Counter:
    """Counts the additions of cotangents by module and shape. A value with n uses has n - 1 additions."""
    return Counter(_kind(site) for site in sites if site.operation == "add_any")
