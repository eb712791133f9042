"""From what was seen to what is wrong: overflow, underflow, rounding, the loss scale, or not precision at all.

What counts as wrong:

- Overflow: the half-precision step is not finite, float32's is. Or it is finite again, as a division by inf is zero,
  but its loss is off, which with the same bits and no largest number it is not.
- Underflow: rounding to zero took more than `tolerance` of a gradient's norm. A gradient may be zero for want of bits
  too, where terms cancel; what counts is what is not zero with as many bits and no smallest number. Or the step is not
  finite, or its loss is off, because of a value that underflowed, as where it is divided by.
- Rounding: the loss is off, and some module, given float32's inputs, is off by more than `tolerance` of its result's
  norm; or the loss is off by more than half, so that not one of its bits is right. Or the step is not finite with any
  range for want of bits alone, as where 1 - 0.999 is 0, or a variance less than 0, and its logarithm or root is taken.
- Not precision: float32's step is not finite either.

The reference is the float32 program, with the constants that it has there.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.health import Reference, all_finite, flushed_share, loss_error, lost_shares, outputs_of
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import EXPONENTS, Reading, Site
from mpjax.diagnosis.scales import healthy_scale, lower_scale
from mpjax.diagnosis.trace import Trace, run
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import is_floating


class Finding(NamedTuple):
    """What is wrong.

    Attributes:
      verdict: "healthy", "overflow", "underflow", "rounding", "loss_scale" or "not_precision".
      site: where it begins; None if healthy, or if no operation can be named.
      evidence: one paragraph.
      better_scale: a loss scale with which the step is healthy; None if none was found, or none is needed.
    """

    verdict: str
    site: Site | None
    evidence: str
    better_scale: float | None = None


def find(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding:
    """What is wrong with a step, from its emulation with errors carried on.

    Args:
      program: the step.
      trace: its emulation.
      scale: the loss scale.
      reference: what it is held against.
    """
    if not all_finite(trace.wide):
        return _not_precision(program, trace, scale)
    if not all_finite(trace.low):
        return _not_finite(program, trace, scale, reference)
    if (finding := _hidden(program, trace, scale, reference)) is not None:
        return finding
    if (finding := _underflow(program, trace, scale, reference)) is not None:
        return finding
    return _rounding(program, trace, scale, reference)


def _not_precision(program: Program, trace: Trace, scale: float) -> Finding:
    site = _reference_begins(trace)
    if site is None or site.operation == "parameter":
        inputs = zip(program.names, program.at(scale)[1], strict=False)  # the scale has no name
        bad = [name for name, value in inputs if is_floating(value) and not bool(jnp.isfinite(value).all())]
        where = f"an input is not finite already: {_some(bad)}" if bad else "a constant is not finite already"
    else:
        where = f"it begins in {_named(site)}"
    if program.constants.by_itself:
        advice = (
            "But the code computes in half precision by itself, whatever the policy, where a constant may be zero or "
            "infinite: call .astype(jnp.float32) in its place, and ask again."
        )
    else:
        advice = "No choice of dtypes repairs it: look at the data, the parameters and the learning rate."
    return Finding("not_precision", site, f"The step is not finite in float32 either: {where}. {advice}")


def _some(names: Sequence[str]) -> str:
    """The first three of some names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reference_begins(trace: Trace) -> Site | None:
    """Where the reference is the first time not finite of what is finite."""
    pairs = zip(trace.sites, trace.readings, strict=True)
    return next((site for site, reading in pairs if reading.reference_begins > 0), None)


def _not_finite(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding:
    index = next((i for i, reading in enumerate(trace.readings) if reading.begins > 0), None)
    if index is None:  # where float32's program has other operations
        site = _reference_begins(trace)
        begins = "" if site is None else f" It begins in {_named(site)}."
        return Finding("overflow", site, f"The step is not finite in half precision.{begins} In float32 it is.")
    site, reading = trace.sites[index], trace.readings[index]
    if reading.overflow == 0 and not all_finite(outputs_of(_UNRANGED, program, scale)):
        return Finding(
            "rounding",
            site,
            f"{reading.non_finite:.0f} of {reading.size:.0f} values of {_named(site)} are not finite, though none is "
            f"too large or too small for {site.dtype}: what goes in is off by roundings, as where nearly equal "
            "numbers cancel. In float32 the step is finite.",
        )
    if reading.overflow == 0 and reading.flushed >= 0:
        # A division by what became zero, a logarithm of it: the fault is where it became zero.
        source, flushed = trace.sites[reading.flushed], trace.readings[reading.flushed]
        return Finding(
            "underflow",
            source,
            f"{_vanished(source, flushed)}, so that {_named(site)} is not finite. In float32 the step is.",
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


_UNRANGED = Emulator(reference=False, ranged=False)


def _hidden(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding | None:
    """A fault of range on the way to a finite step, if the loss is wrong for want of it and not of bits."""
    if reference.has_loss(trace.low, scale):
        return None
    forward = [seen for seen in zip(trace.sites, trace.readings, strict=True) if seen[0].direction == "forward"]
    over = next((seen for seen in forward if seen[1].begins and seen[1].overflow), None)
    under = next((seen for seen in forward if seen[1].underflow and seen[1].lost_share > reference.tolerance), None)
    seen = over or under
    if seen is None or not reference.has_loss(outputs_of(_UNRANGED, program, scale), scale):
        return None
    what = _passed(*seen) if over else _vanished(*seen)
    off = f"its loss is off by {loss_error(trace.wide[0], trace.low[0]):.2g} of its value"
    verdict = "overflow" if over else "underflow"
    return Finding(verdict, seen[0], f"{what}. The step is finite all the same, but {off}.")


def _vanished(site: Site, reading: Reading) -> str:
    share = reading.underflow / reading.size
    return f"{share:.1%} of the values of {_named(site)} are too small for {site.dtype} and become zero"


def _passed(site: Site, reading: Reading) -> str:
    return (
        f"{reading.non_finite:.0f} of {reading.size:.0f} values of {_named(site)} pass the largest number of "
        f"{site.dtype}{_size_before(reading)}"
    )


def _size_before(reading: Reading) -> str:
    exponents = np.nonzero(reading.histogram)[0]
    return f" (they reach 2^{EXPONENTS[exponents[-1]] + 1})" if len(exponents) else ""


def _underflow(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding | None:
    lost, tolerance = lost_shares(reference, program, scale, trace.low), reference.tolerance
    if max(lost, default=0.0) <= tolerance:
        return None
    worst = int(np.argmax(lost))
    flushed = flushed_share(trace.wide[1 + worst], trace.low[1 + worst])
    index = next((i for i, reading in enumerate(trace.readings) if reading.lost_share > tolerance), None)
    site = None if index is None else trace.sites[index]
    where = "" if site is None else f", beginning in {_named(site)}"
    evidence = (
        f"{flushed:.1%} of the gradient of {program.gradients[worst]} are too small for half precision and become "
        f"zero{where}. In float32 they are not zero. The loss scale is {scale:g}."
    )
    return Finding("underflow", site, evidence, healthy_scale(reference, program, scale, 2.0**4))


def _rounding(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding:
    error, tolerance = loss_error(trace.wide[0], trace.low[0]), reference.tolerance
    if error <= tolerance:
        evidence = f"The step is finite, the loss is within {error:.2g} of float32's, and no gradient is lost."
        return Finding("healthy", None, evidence)
    if reference.has_loss(trace.low, scale):
        why = (
            f"as terms of {reference.terms:.2g} together cancel"
            if reference.terms_cancel(trace.low, scale)
            else "and not determined in float32 either: other last bits of the inputs change it"
        )
        evidence = (
            f"The step is finite and no gradient is lost. The loss is off by {error:.2g} of its value, which is near "
            f"zero, {why}. The gradients are off by {reference.gradient_error(trace.low, scale):.2g} of their norm"
            + ("." if reference.determined(slice(1, None)) else ", which float32 does not determine either.")
        )
        return Finding("healthy", None, evidence)
    alone = run(program, scale, isolated=True)
    forward = [i for i, site in enumerate(alone.sites) if site.direction == "forward"]
    ranked = sorted(forward, key=lambda i: alone.readings[i].relative_error, reverse=True)
    own = alone.readings[ranked[0]].relative_error
    # In a program that has other operations than float32's, a module's own error is not all that it does otherwise;
    # but other random numbers are no fault.
    differs = reference.program is not program and not _is_random(program)
    if own <= tolerance and error <= 0.5 and not differs:
        evidence = (
            f"The step is finite and no gradient is lost. The loss is off by {error:.2g} of its value, by roundings "
            f"in all modules: none is off by more than {own:.2g} of its norm when given float32's inputs."
        )
        return Finding("healthy", None, evidence)

    def without(path: str) -> float:
        kept = Emulator(rounds=lambda other: other != path, reference=False)
        return loss_error(trace.wide[0], outputs_of(kept, program, scale)[0])

    # What is near zero is far off by little: the most wrong is not always what the loss hangs on.
    worst = {alone.sites[i].path: i for i in reversed(ranked)}
    paths = sorted(worst, key=lambda path: alone.readings[worst[path]].relative_error, reverse=True)[:_SUSPECTS]
    left, path = _first_below(tolerance, ((without(path), path) for path in paths))
    site, own = alone.sites[worst[path]], alone.readings[worst[path]].relative_error
    return Finding(
        "rounding",
        site,
        f"The loss is off by {error:.2g} of its value, though all is finite and nothing became zero. Most of it comes "
        f"from {_named(site)}: given float32's inputs its result is off by {own:.2g} of its norm, and without its "
        f"module's roundings the loss is off by {left:.2g}.",
    )


_SUSPECTS = 8
"""How many modules are left out of rounding, one at a time, to see which of them a loss hangs on."""


def _is_random(program: Program) -> bool:
    return any(eqn.primitive.name.startswith("random_") for _, eqn in equations(program.jaxpr))


def _first_below(limit: float, pairs: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The first pair whose number is below a limit, else the smallest."""
    seen: list[tuple[float, str]] = []
    for pair in pairs:
        seen.append(pair)
        if pair[0] <= limit:
            return pair
    return min(seen)


def _named(site: Site) -> str:
    return f"{site.operation} in {site.path or 'no module'} ({site.direction}, {site.source})"
