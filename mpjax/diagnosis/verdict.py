"""From what was seen to what is wrong: overflow, underflow, rounding, the loss scale, or not precision at all.

What counts as wrong:

- Overflow: the half-precision step is not finite, float32's is. Or it is finite again, as a division by inf is zero,
  but its loss is off by more than `tolerance`, which with the same bits and no largest number it is not.
- Underflow: rounding to zero took more than `tolerance` of a gradient's norm. A gradient may be zero for want of bits
  too, where terms cancel; what counts is what is not zero with as many bits and no smallest number. Or the step is not
  finite because of a zero that is none with a smaller smallest number, as where it is divided by.
- Rounding: the loss is off by more than `tolerance`, and some module, given float32's inputs, is off by more than
  `tolerance` of its result's norm; or the loss is off by more than half, so that not one of its bits is right. The
  error of a small loss alone says little: that of a network that is sure of its answers is small because large numbers
  cancel, and many harmless roundings show in it. Or the step is not finite with any range for want of bits alone, as
  where 1 - 0.999 is 0, or a variance less than 0, and its logarithm or root is taken.
- Not precision: float32's step is not finite either.

The reference has the constants of the half-precision program, in which 1e-8 is zero already. Where it is not finite,
float32's own program decides.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import EXPONENTS, Reading, Recorder, Site, ratio
from mpjax.precision.casting.jaxprs import equations
from mpjax.precision.dtypes import HALF, float_range, is_floating


class Trace(NamedTuple):
    """One emulated run of a step.

    Attributes:
      sites: its equations with a floating result, in program order.
      readings: of each.
      wide: scaled loss and scaled gradients of the reference.
      low: and in half precision.
    """

    sites: list[Site]
    readings: list[Reading]
    wide: list
    low: list


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


def run(program: Program, scale: float, *, isolated: bool = False) -> Trace:
    """Emulates the step, with a reading of every operation."""
    recorder = Recorder()
    outputs = Emulator(isolated=isolated, recorder=recorder).run(*program.at(scale))
    wide, low = jax.device_get(([p.wide for p in outputs], [p.low for p in outputs]))
    return Trace(recorder.sites, recorder.readings(), wide, low)


def against(trace: Trace, full: Program, scale: float) -> Trace:
    """A run with the outputs of float32's own program for reference, which has constants that half has not."""
    return trace._replace(wide=_outputs(Emulator(reference=False), full, scale))


def find(program: Program, trace: Trace, scale: float, tolerance: float, full: Program | None = None) -> Finding:
    """What is wrong with a step, from its emulation with errors carried on.

    Args:
      program: the step.
      trace: its emulation.
      scale: the loss scale.
      tolerance: as of `mpjax.diagnose`.
      full: float32's own program, where its outputs are the reference.
    """
    if not all_finite(trace.wide):
        return _not_precision(program, trace, scale)
    if full is not None and not all_finite(trace.low):
        return _constant(program, full, trace)
    if not all_finite(trace.low):
        return _not_finite(program, trace, scale, tolerance)
    if (finding := _hidden_overflow(program, trace, scale, tolerance)) is not None:
        return finding
    if (finding := _underflow(program, trace, scale, tolerance)) is not None:
        return finding
    return _rounding(program, trace, scale, tolerance)


def is_repaired(
    program: Program, wide: Sequence, scale: float, tolerance: float, rounds: Callable[[str], bool] = lambda path: True
) -> bool:
    """Whether a step, rounding where it `rounds`, is finite, its loss near the reference's, no gradient lost to zero.

    Args:
      program: the step.
      wide: the reference's outputs at a loss scale of 1.
      scale: the loss scale.
      tolerance: of the loss's relative error, and of the share of a gradient's norm that is lost.
      rounds: as of `Emulator`.
    """
    emulator = Emulator(rounds=rounds, reference=False)
    low = _outputs(emulator, program, scale)
    if not all_finite(low) or loss_error(np.float64(wide[0]) * scale, low[0]) > tolerance:
        return False
    scaled = [np.float64(w) * scale for w in wide[1:]]
    return max(_lost(program, scale, scaled, low[1:], tolerance, rounds), default=0.0) <= tolerance


def loss_error(wide, low) -> float:
    """Relative error of a loss."""
    return float(abs(np.float64(low) - np.float64(wide)) / max(abs(np.float64(wide)), 1e-30))


def flushed_share(wide, low) -> float:
    """The share of a gradient's values that are zero in half precision and not in the reference."""
    wide, low = np.asarray(wide), np.asarray(low)
    return float(np.mean((low == 0) & (wide != 0))) if wide.size else 0.0


def all_finite(arrays: Sequence) -> bool:
    """Whether there is neither inf nor nan in arrays."""
    return all(bool(np.isfinite(x).all()) for x in map(np.asarray, arrays))


def _outputs(emulator: Emulator, program: Program, scale: float) -> list[np.ndarray]:
    return jax.device_get([pair.low for pair in emulator.run(*program.at(scale))])


def _lost(program: Program, scale: float, wide, low, tolerance: float, rounds=lambda path: True) -> list[float]:
    """Of each gradient's norm, what rounding to zero took."""
    lost = [_zero_share(w, x) for w, x in zip(wide, low, strict=True)]
    if max(lost, default=0.0) <= tolerance:
        return lost
    # Zero for want of range, or of bits? Without a smallest number only bits are wanting.
    unranged = _outputs(Emulator(rounds=rounds, reference=False, ranged=False), program, scale)[1:]
    return [0.0 if _is_noise(w, u) else _zero_share(u, x) for w, u, x in zip(wide, unranged, low, strict=True)]


def _is_noise(wide, unranged) -> bool:
    """Whether no bit of a gradient is right for want of bits alone, as where all of it cancels: nothing is to lose."""
    wide, unranged = np.asarray(wide, np.float64), np.asarray(unranged, np.float64)
    return float(np.sum(np.square(unranged - wide))) >= float(np.sum(np.square(wide)))


def _zero_share(wide, low) -> float:
    wide, low = np.asarray(wide, np.float64), np.asarray(low, np.float64)
    return ratio(float(np.sum(np.square(wide[low == 0]))), float(np.sum(np.square(wide))))


def _not_precision(program: Program, trace: Trace, scale: float) -> Finding:
    site = _reference_begins(trace)
    if site is None or site.operation == "parameter":
        inputs = zip(program.names, program.at(scale)[1], strict=False)  # the scale has no name
        bad = [name for name, value in inputs if is_floating(value) and not bool(jnp.isfinite(value).all())]
        where = f"an input is not finite already: {_some(bad)}" if bad else "a constant is not finite already"
    else:
        where = f"it begins in {_named(site)}"
    return Finding(
        "not_precision",
        site,
        f"The step is not finite in float32 either: {where}. No choice of dtypes repairs it: look at the data, the "
        "parameters and the learning rate.",
    )


def _some(names: Sequence[str]) -> str:
    """The first three of some names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reference_begins(trace: Trace) -> Site | None:
    """Where the reference is the first time not finite of what is finite."""
    pairs = zip(trace.sites, trace.readings, strict=True)
    return next((site for site, reading in pairs if reading.reference_begins > 0), None)


def _constant(program: Program, full: Program, trace: Trace) -> Finding:
    """The fault of a constant that half precision has not, so that without any further rounding the step fails too."""
    site = _reference_begins(trace)
    half = next(site.dtype for site in trace.sites if site.dtype in HALF)
    limits = float_range(half)
    gone = _constants(full) - _constants(program)
    large = sorted({value for _, value in gone if limits.largest < abs(value) < np.inf})
    small = sorted({value for _, value in gone if 0 < abs(value) <= limits.smallest_subnormal / 2})
    verdict = "overflow" if large else "underflow" if small else "rounding"
    named = ", ".join(f"{value:g} is {'zero' if value in small else 'inf'}" for value in large or small)
    begins = "" if site is None else f" It begins in {_named(site)}."
    return Finding(
        verdict,
        site,
        f"The step is not finite with the constants that {half} has{f': {named}' if named else ''}.{begins} In float32 "
        "it is.",
    )


def _constants(program: Program) -> set[tuple[str, float]]:
    """The floating numbers written in a program, each with the module that it stands in."""
    return {
        (path, float(atom.val))
        for path, eqn in equations(program.jaxpr)
        for atom in eqn.invars
        if isinstance(atom, core.Literal) and is_floating(atom.aval)
    }


def _not_finite(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding:
    index = next((i for i, reading in enumerate(trace.readings) if reading.begins > 0), None)
    if index is None:
        return Finding("overflow", None, "The step is not finite in half precision. In float32 it is.")
    site, reading = trace.sites[index], trace.readings[index]
    if reading.overflow == 0 and not all_finite(_outputs(Emulator(reference=False, ranged=False), program, scale)):
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
            f"{flushed.underflow / flushed.size:.1%} of the values of {_named(source)} are too small for "
            f"{source.dtype} and become zero, so that {_named(site)} is not finite. In float32 the step is.",
        )
    evidence = f"{_passed(site, reading)}. In float32 the step is finite."
    if site.direction == "backward":
        lower = _lower_scale(program, trace, scale, tolerance)
        if lower is not None:
            return Finding(
                "loss_scale",
                site,
                f"{evidence} With a loss scale of {lower:g} instead of {scale:g} it is finite in half precision too.",
                lower,
            )
    return Finding("overflow", site, evidence)


def _hidden_overflow(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding | None:
    """Inf on the way to a finite step, if the loss is wrong for want of range and not of bits."""
    seen = zip(trace.sites, trace.readings, strict=True)
    first = next(((s, r) for s, r in seen if s.direction == "forward" and r.begins and r.overflow), None)
    error = loss_error(trace.wide[0], trace.low[0])
    if first is None or error <= tolerance:
        return None
    unranged = _outputs(Emulator(reference=False, ranged=False), program, scale)
    if loss_error(trace.wide[0], unranged[0]) > tolerance:
        return None
    finite = f"The step is finite all the same, but its loss is off by {error:.2g} of its value"
    return Finding("overflow", first[0], f"{_passed(*first)}. {finite}.")


def _passed(site: Site, reading: Reading) -> str:
    return (
        f"{reading.non_finite:.0f} of {reading.size:.0f} values of {_named(site)} pass the largest number of "
        f"{site.dtype}{_size_before(reading)}"
    )


def _size_before(reading: Reading) -> str:
    exponents = np.nonzero(reading.histogram)[0]
    return f" (they reach 2^{EXPONENTS[exponents[-1]] + 1})" if len(exponents) else ""


_ROOM = 2.0**-4
"""A loss scale that was found by shrinking is shrunk by this once more: the next batch may pass one at the brink."""


def _lower_scale(program: Program, trace: Trace, scale: float, tolerance: float) -> float | None:
    """A smaller loss scale, from 1, with which a step is healthy, and with room if there is some."""
    lower = _healthy_scale(program, trace, scale, tolerance, 0.5)
    if lower is None or lower * _ROOM < 1 or not _is_healthy_at(program, trace, scale, tolerance, lower * _ROOM):
        return lower
    return lower * _ROOM


def _healthy_scale(program: Program, trace: Trace, scale: float, tolerance: float, factor: float) -> float | None:
    """The first power of two, from `scale` by a factor to 1 or 2^24, as loss scale of which the step is healthy."""
    other = 2.0 ** math.floor(math.log2(scale))
    while (other := other * factor) >= 1 and (factor < 1 or other <= 2.0**24):
        if _is_healthy_at(program, trace, scale, tolerance, other):
            return other
    return None


def _is_healthy_at(program: Program, trace: Trace, scale: float, tolerance: float, other: float) -> bool:
    return is_repaired(program, [np.float64(w) / scale for w in trace.wide], other, tolerance)


def _underflow(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding | None:
    lost = _lost(program, scale, trace.wide[1:], trace.low[1:], tolerance)
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
    return Finding("underflow", site, evidence, _healthy_scale(program, trace, scale, tolerance, 2.0**4))


def _rounding(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding:
    error = loss_error(trace.wide[0], trace.low[0])
    if error <= tolerance:
        evidence = f"The step is finite, the loss is within {error:.2g} of float32's, and no gradient is lost."
        return Finding("healthy", None, evidence)
    alone = run(program, scale, isolated=True)
    forward = [i for i, site in enumerate(alone.sites) if site.direction == "forward"]
    ranked = sorted(forward, key=lambda i: alone.readings[i].relative_error, reverse=True)
    own = alone.readings[ranked[0]].relative_error
    if own <= tolerance and error <= 0.5:
        evidence = (
            f"The step is finite and no gradient is lost. The loss is off by {error:.2g} of its value, by roundings "
            f"in all modules: none is off by more than {own:.2g} of its norm when given float32's inputs."
        )
        return Finding("healthy", None, evidence)

    def without(path: str) -> float:
        kept = Emulator(rounds=lambda other: other != path, reference=False)
        return loss_error(trace.wide[0], _outputs(kept, program, scale)[0])

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
