"""Decides the verdict of a diagnosis: overflow, underflow, rounding, loss scale or not precision.

- Overflow: the step is not finite in half precision and finite in float32. Or the step is finite because a division by
  inf gave zero, but its loss or a gradient is wrong, and would be right with the same mantissa bits and a larger range.
- Underflow: more than `tolerance` of a gradient's norm underflowed to zero. Values that are zero with unlimited range
  too, because rounded terms cancel, are excluded. Or a value that underflowed, such as a divisor, makes the step
  non-finite or its loss wrong.
- Rounding: the loss is wrong, and some module with float32 inputs has an error above `tolerance` of its result's norm.
  Or the loss is off by more than half, so none of its bits is right. Or the step is not finite because of rounding
  alone: 1 - 0.999 is rounded to 0, or a variance is below 0, and its logarithm or root is taken. Or the loss is right
  and a gradient is wrong, because half precision adds up cotangents, or a derivative is inaccurate.
- Loss scale: the backward pass overflows, and the step is healthy with a lower loss scale.
- Not precision: the step is not finite in float32 either.

The reference is the float32 program with float32 constants.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.finding import Finding, named
from mpjax.diagnosis.formats import FLOAT8, NARROW
from mpjax.diagnosis.health import Reference, all_finite, flushed_fraction, loss_error, lost_fractions, outputs_of
from mpjax.diagnosis.indices import out_of_range
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import EXPONENTS, Reading, Site
from mpjax.diagnosis.rounding import find_rounding
from mpjax.diagnosis.scales import healthy_scale, lower_scale
from mpjax.diagnosis.search import at_fault
from mpjax.diagnosis.sums import lost_sum
from mpjax.diagnosis.trace import Trace
from mpjax.precision.dtypes import is_floating


def find(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding:
    """Finds the fault of a step in its emulated run. The verdict is "healthy" if there is none.

    Further emulated runs test what removes the fault.

    Args:
      program: the step.
      trace: the emulated run of the step, in which errors propagate from module to module.
      scale: the loss scale.
      reference: the float32 step to compare with.
    """
    if not all_finite(trace.wide):
        return _not_precision(program, trace, scale)
    if not all_finite(trace.low):
        return _not_finite(program, trace, scale, reference)
    # Gradients that are zero are an underflow, unless the loss is wrong too.
    right = loss_error(trace.wide[0], trace.low[0]) <= reference.tolerance and reference.without_float8 is None
    for check in (_underflow, _hidden, lost_sum) if right else (_hidden, _underflow, lost_sum):
        if (finding := check(program, trace, scale, reference)) is not None:
            return finding
    return find_rounding(program, trace, scale, reference)


def _not_precision(program: Program, trace: Trace, scale: float) -> Finding:
    """Explains a step that is not finite in float32: by an index, an input, a constant, or the first operation."""
    site = _reference_begins(trace)
    if site is not None and site.operation == "gather" and (index := out_of_range(program, scale)):
        where = f"an index is out of range, {index[0]} of {index[1]}, such as a label of no class, in {named(site)}"
        return Finding("not_precision", site, f"The step is not finite in float32 either: {where}. Check the data.")
    if site is None or site.operation == "parameter":
        inputs = zip(program.names, program.at(scale)[1], strict=False)  # the last input, the scale, has no name
        bad = [name for name, value in inputs if is_floating(value) and not bool(jnp.isfinite(value).all())]
        where = f"an input is not finite: {_some(bad)}" if bad else "a constant is not finite"
    else:
        where = f"the first non-finite result is {named(site)}"
    if program.constants.by_itself:
        advice = (
            "However, the code itself casts to half precision under any policy, and a constant may be zero or inf "
            "there: replace that cast with .astype(jnp.float32), and run the diagnosis again."
        )
    else:
        advice = "No choice of dtypes repairs it: check the data, the parameters and the learning rate."
    reason = "The step is not finite in float32 either"
    return Finding("not_precision", site, f"{reason}: {where}. {advice}", reason=reason)


def _some(names: Sequence[str]) -> str:
    """Lists the first three names, and counts the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reference_begins(trace: Trace) -> Site | None:
    """The first operation that has finite inputs and a result that is not finite, in the float32 reference."""
    pairs = zip(trace.sites, trace.readings, strict=True)
    return next((site for site, reading in pairs if reading.reference_begins > 0), None)


def _not_finite(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding:
    """Explains a step that is finite in float32 only. The verdict is overflow, rounding, underflow or loss scale."""
    index = next((i for i, reading in enumerate(trace.readings) if reading.begins > 0), None)
    if index is None:  # the program contains inf, as in a `where`, and only half precision selects it
        index = next((i for i, reading in enumerate(trace.readings) if reading.non_finite > 0), None)
    if index is None:  # possible if the float32 program has other operations
        site = _reference_begins(trace)
        begins = "" if site is None else f" The first non-finite result is {named(site)}."
        return Finding("overflow", site, f"The step is not finite in half precision.{begins} In float32 it is finite.")
    site, reading = trace.sites[index], trace.readings[index]
    if reading.overflow == 0 and not all_finite(outputs_of(_UNRANGED, program, scale)):
        return Finding(
            "rounding",
            site,
            f"{reading.non_finite:.0f} of {reading.size:.0f} values of {named(site)} are not finite. The cause is "
            "rounding error in the operation's inputs, for example where nearly equal numbers cancel, and not the "
            f"range of {site.dtype}. In float32 the step is finite.",
        )
    if reading.overflow == 0 and (before := _flushed_before(index, program, trace, scale)) >= 0:
        # For example a division by a value that underflowed to zero, or its logarithm. The fault is the underflow.
        source, flushed = trace.sites[before], trace.readings[before]
        return Finding(
            "underflow",
            source,
            f"{_vanished(source, flushed)}, so {named(site)} is not finite. In float32 the step is finite.",
        )
    evidence = f"{_passed(site, reading)}. In float32 the step is finite."
    if site.direction == "backward":
        lower = lower_scale(reference, program, scale)
        if lower is not None:
            return Finding(
                "loss_scale",
                site,
                f"{evidence} With a loss scale of {lower:g} instead of {scale:g} it is finite in half precision too.",
                lower,
            )
    return Finding("overflow", site, evidence)


def _flushed_before(index: int, program: Program, trace: Trace, scale: float) -> int:
    """The index of the site whose underflow makes the result of site number `index` non-finite; -1 if none does.

    The result depends on the underflowed values, or on a `where` that they decide.
    """
    if (flushed := trace.readings[index].flushed) >= 0:
        return flushed
    before = [i for i, reading in enumerate(trace.readings[:index]) if reading.underflow > 0]
    return before[-1] if before and all_finite(outputs_of(_NO_BOTTOM, program, scale)) else -1


_UNRANGED = Emulator(reference=False, top=False, bottom=False)
_NO_TOP = Emulator(reference=False, top=False)
_NO_BOTTOM = Emulator(reference=False, bottom=False)


def _hidden(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding | None:
    """Finds the overflow or underflow that makes the loss or a gradient of a finite step wrong; None if there is none.

    If both occur, the fault is the underflow if the step is right without underflow, else the overflow.
    """
    if reference.has_loss(trace.low, scale):
        return None
    lost = max(reference.per_gradient_errors(trace.low, scale), default=0.0) > reference.limit
    read = zip(trace.sites, trace.readings, strict=True)
    decisive = [entry for entry in read if lost or entry[0].direction == "forward"]
    over = [entry for entry in decisive if entry[1].begins and entry[1].overflow]
    under = [entry for entry in decisive if _loses(*entry, reference.tolerance)]
    if not (over or under):
        under = [max(small, key=_fading)] if (small := [entry for entry in decisive if _fading(entry)]) else []
    if not (over or under) or not reference.has_loss(outputs_of(_UNRANGED, program, scale), scale):
        return None
    if over and under and reference.has_loss(outputs_of(_NO_BOTTOM, program, scale), scale):
        over = []
    entry = at_fault(over or under, program, scale, reference)
    assert entry is not None
    cause = _passed(*entry) if over else _vanished(*entry)
    off = f"its loss has a relative error of {loss_error(trace.wide[0], trace.low[0]):.2g}"
    if errors := reference.per_gradient_errors(trace.low, scale):
        off += f", and a gradient one of {max(errors):.2g}"
    verdict = "overflow" if over else "underflow"
    evidence = f"{cause}. The step is still finite, but {off}."
    return Finding(verdict, entry[0], evidence, accepts=reference.limit if lost else None)


def _loses(site: Site, reading: Reading, tolerance: float) -> bool:
    """True if more than `tolerance` of a result's norm underflows to zero.

    In float8 it is enough that more than `tolerance` of its values do, because one outlier may make up the whole norm.
    """
    return reading.lost_fraction > tolerance or (
        site.dtype in FLOAT8 and site.operation != "saturation" and reading.underflow > tolerance * reading.size
    )


def _fading(entry: tuple[Site, Reading]) -> float:
    """The fraction of a site's values that underflow to zero or, in a loop, are subnormal.

    It is 0 if the site does not have half precision.
    """
    site, reading = entry
    faded = reading.underflow + (reading.subnormal if site.steps > 1 else 0)
    return faded / reading.size if site.dtype in NARROW and reading.size else 0.0


def _vanished(site: Site, reading: Reading) -> str:
    """Describes in words, for evidence, how many values of a site underflow to zero."""
    fraction = reading.underflow / reading.size
    if site.steps > 1:
        return (
            f"The values of {named(site)} fade little by little in a loop of {site.steps:,} steps: of all, "
            f"{fraction:.1%} underflow to zero in {site.dtype}, and {reading.subnormal / reading.size:.1%} lose bits "
            "because they are nearly as small"
        )
    return f"{fraction:.1%} of the values of {named(site)} underflow to zero in {site.dtype}"


def _passed(site: Site, reading: Reading) -> str:
    """Describes in words, for evidence, how many values of a site overflow or, in float8, saturate."""
    if site.operation == "saturation":
        return (
            f"{reading.overflow:.0f} of {reading.size:.0f} values of {named(site)} are beyond the largest of the "
            f"history that scales them, and saturate in {site.dtype}"
        )
    return (
        f"{reading.non_finite:.0f} of {reading.size:.0f} values of {named(site)} overflow in "
        f"{site.dtype}{_size_before(reading)}"
    )


def _size_before(reading: Reading) -> str:
    """The power of two that bounds the float32 magnitudes of a reading, in brackets; empty if all are zero."""
    exponents = np.nonzero(reading.histogram)[0]
    return f" (magnitudes up to 2^{EXPONENTS[exponents[-1]] + 1})" if len(exponents) else ""


def _underflow(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding | None:
    """Finds the underflow (or the overflow behind it) that makes too much of a gradient zero; None if there is none."""
    lost, tolerance = lost_fractions(reference, program, scale, trace.low), reference.tolerance
    if max(lost, default=0.0) <= tolerance:
        return None
    worst = int(np.argmax(lost))
    if (finding := _zero_by_overflow(program, trace, scale, reference, program.parameter(worst))) is not None:
        return finding
    flushed = flushed_fraction(trace.wide[1 + worst], trace.low[1 + worst])
    index = next((i for i, reading in enumerate(trace.readings) if reading.lost_fraction > tolerance), None)
    site = _flushing(program.gradients[worst], trace) if index is None else trace.sites[index]
    if site is None:
        where = ""
    elif index is None and site.steps > 1:
        where = f", little by little in a loop of {site.steps:,} steps, in {named(site)}"
    else:
        where = f", first in {named(site)}"
    evidence = (
        f"{flushed:.1%} of the gradient values of {program.parameter(worst)} underflow to zero in half "
        f"precision{where}. In float32 they are not zero. The loss scale is {scale:g}."
    )
    return Finding("underflow", site, evidence, healthy_scale(reference, program, scale, 2.0**4))


def _zero_by_overflow(
    program: Program, trace: Trace, scale: float, reference: Reference, gradient: str
) -> Finding | None:
    """Finds the overflow that makes gradients zero, for example by a division by inf; None if no overflow does.

    The first overflow is at fault if gradients are still lost without underflow, and kept without overflow; the step is
    emulated again to find out. `gradient` is the path of one that is lost, for the evidence.
    """
    entries = zip(trace.sites, trace.readings, strict=True)
    over = next(((site, reading) for site, reading in entries if reading.begins and reading.overflow), None)
    if over is None or _keeps_gradients(_NO_BOTTOM, program, scale, reference):
        return None
    if not _keeps_gradients(_NO_TOP, program, scale, reference):
        return None
    evidence = (
        f"{_passed(*over)}. The step is still finite, but a division by inf, or the like, makes gradient values of "
        f"{gradient} zero. In float32, or with larger exponents alone, they are not zero."
    )
    return Finding("overflow", over[0], evidence)


def _keeps_gradients(emulator: Emulator, program: Program, scale: float, reference: Reference) -> bool:
    """True if a step emulated with other settings is finite and loses no gradient to underflow."""
    low = outputs_of(emulator, program, scale)
    return all_finite(low) and max(lost_fractions(reference, program, scale, low), default=0.0) <= reference.tolerance


def _flushing(gradient: str, trace: Trace) -> Site | None:
    """Finds the site with the largest fraction of underflow; None if nothing underflows.

    Sites in the module of `gradient` and sites in float8 come before all others. In float8 an outlier sets the scale:
    the values that then underflow have a small norm, but their gradients may be large.
    """
    module = gradient.rpartition("/")[0]
    candidates = [
        (site.path == module or site.dtype in FLOAT8, reading.underflow / reading.size, site)
        for site, reading in zip(trace.sites, trace.readings, strict=True)
        if reading.underflow
    ]
    return max(candidates, key=lambda entry: entry[:2])[2] if candidates else None
