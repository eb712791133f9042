"""Finds sums of cotangents in half precision that make a gradient wrong, while the loss is right.

These sums occur only in the backward pass. If a value is read many times, the gradient with respect to it is the sum of
as many cotangents, and JAX adds them in the dtype of the value. Examples are the operands of a gather, of a broadcast
or of a window, a value with many uses, and a value that every step of a loop reads.
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
from mpjax.diagnosis.trace import Trace, emulated
from mpjax.precision.casting.primitives import SUMS


_NOISE = 0.01
"""The relative error above which a sum is examined. A result that is rounded once has at most 0.004."""

_ADDITIONS = ("add", "add_any")
_LONG = 16
"""The number of terms of a chain of additions, or of the carry of a scan, from which they are examined as one sum."""


def lost_sum(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding | None:
    """Finds the sum of cotangents that makes a gradient wrong in a step whose loss is right.

    A sum is at fault if a gradient has a relative error above the tolerance, and the largest error of a gradient falls
    to 0.6 of its value or less when sums of cotangents are computed in float32 and rounded once. The step is emulated
    again to find out.

    Returns:
      A finding with the verdict "rounding", which names the sum with the largest relative error. None if no sum is at
      fault, if the loss is wrong, or if the step has products in float8.
    """
    error, tolerance = loss_error(trace.wide[0], trace.low[0]), reference.tolerance
    if error > tolerance or reference.without_float8 is not None or not long_sums(trace):
        return None
    strict = dataclasses.replace(reference, accepts=tolerance)
    errors = strict.per_gradient_errors(trace.low, scale)
    worst = max(errors, default=0.0)
    if worst <= tolerance:
        return None
    in_float32 = outputs_of(Emulator(reference=False, keeps=sums_of_cotangents), program, scale)
    left = max(strict.per_gradient_errors(in_float32, scale))
    if left > 0.6 * worst:
        return None
    alone = long_sums(emulated(program, scale, isolated=True))
    input_note = "with float32 inputs, " if alone else ""  # else the sum rounds little without the errors of its inputs
    site, reading = max(alone or long_sums(trace), key=lambda entry: entry[1].relative_error)
    wrong = program.parameter(errors.index(worst))
    evidence = (
        f"The step is finite and its loss has a relative error of {error:.2g}, but the gradient of {wrong} has one of "
        f"{worst:.2g}. It comes from {sum_in_words(site, program, trace)}: {input_note}its result has a relative error "
        f"of {reading.relative_error:.2g}. With sums of cotangents in float32, the gradient has one of "
        f"{left:.2g}."
    )
    return Finding("rounding", site, evidence, accepts=(worst + left) / 2)


def noted_sum(program: Program, trace: Trace, scale: float, reference: Reference) -> str:
    """Describes the sum of cotangents with the largest rounding error in a healthy step.

    The sentence begins with a space, to be appended to evidence. It is empty if no sum or no gradient has a relative
    error above `_NOISE`.
    """
    noisy = [entry for entry in long_sums(trace) if _noise(entry[1]) > _NOISE]
    if not noisy or max(reference.per_gradient_errors(trace.low, scale), default=0.0) <= _NOISE:
        return ""
    site, reading = max(noisy, key=lambda entry: _noise(entry[1]))
    return f" Of the sums of cotangents, {sum_in_words(site, program, trace)}, loses most: {_noise(reading):.2g}."


def _noise(reading: Reading) -> float:
    """The relative error that rounding adds to a result, in the Euclidean norm."""
    return ratio(reading.noise, reading.exact)


def long_sums(trace: Trace) -> list[tuple[Site, Reading]]:
    """Lists the half-precision sums of cotangents that may be wrong, with their readings, in program order.

    They are the sums (`SUMS`) with a rounding error above `_NOISE`, and each addition in a chain, or in a scan, that
    adds at least `_LONG` terms.
    """
    chains = _chains(trace.sites)
    return [
        (site, reading)
        for site, reading in zip(trace.sites, trace.readings, strict=True)
        if site.direction == "backward" and site.dtype in NARROW
        if (site.operation in SUMS and _noise(reading) > _NOISE)
        or max(site.terms * (site.operation in _ADDITIONS), chains[_kind(site)] + 1) >= _LONG
    ]


def sum_in_words(site: Site, program: Program, trace: Trace) -> str:
    """Describes a sum: number of terms, the value whose cotangents it adds, dtype, operation, module, pass and line.

    All additions of cotangents of one module, shape and pass count as one sum. The value is named if exactly one
    parameter of the site's module has the site's shape. Otherwise only its shape is given.
    """
    terms = max(site.terms, _chains(trace.sites)[_kind(site)] + 1)
    parameters = [
        name
        for name, gradient in zip(program.gradients, trace.wide[1:], strict=True)
        if gradient.shape == site.shape and name.rpartition("/")[0] == site.path and name
    ]
    of = f"`{parameters[0]}`" if len(parameters) == 1 else f"a value of shape {list(site.shape)}"
    return f"the sum of {terms:,} cotangents of {of} in {site.dtype}, {named(site)}"


def _kind(site: Site) -> tuple:
    """The properties that all additions of one sum have in common."""
    return site.operation, site.path, site.shape, site.direction


def _chains(sites: Sequence[Site]) -> Counter:
    """Counts the `add_any` equations for each `_kind`. For a value with n uses there are n - 1 of them."""
    return Counter(_kind(site) for site in sites if site.operation == "add_any")
