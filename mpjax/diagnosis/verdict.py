"""From what was seen to what is wrong: overflow, underflow, rounding, the loss scale, or not precision at all."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mpjax.diagnosis.emulate import Emulator, Site, Step
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import EXPONENTS, Reading, ratio, read


class Trace(NamedTuple):
    """One emulated run of a step.

    Attributes:
      sites: its equations with a floating result, in program order.
      readings: of each.
      wide: scaled loss and scaled gradients of the reference.
      low: and in half precision.
      made_bad: for each site, whether some of its values are inf or nan though all that it got was finite, in half
        precision and in the reference.
    """

    sites: list[Site]
    readings: list[Reading]
    wide: list
    low: list
    made_bad: list[tuple[bool, bool]]


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


def run(program: Program, scale: float, *, isolated: bool = False, progress=None) -> Trace:
    """Emulates the step, with a reading of every operation."""
    sites, readings, made_bad = [], [], []

    def observe(step: Step) -> None:
        reading = read(step)
        sites.append(step.site)
        readings.append(reading)
        low = reading.non_finite > 0 and all(map(_all_finite, step.inputs))
        wide = reading.reference_non_finite > 0 and all(map(_all_finite, step.wide_inputs))
        made_bad.append((low, wide))
        if progress is not None:
            progress()

    outputs = Emulator(isolated=isolated, observe=observe).run(program.jaxpr, program.with_scale(scale))
    return Trace(sites, readings, [p.wide for p in outputs], [p.low for p in outputs], made_bad)


def find(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding:
    """What is wrong with a step, from its emulation with errors carried on."""
    if not all(map(_all_finite, trace.wide)):
        return _not_precision(trace)
    if not all(map(_all_finite, trace.low)):
        return _not_finite(program, trace, scale)
    if (finding := _underflow(program, trace, scale, tolerance)) is not None:
        return finding
    return _rounding(program, trace, scale, tolerance)


def is_repaired(wide: Sequence, low: Sequence, tolerance: float) -> bool:
    """Whether outputs (loss, gradients) are finite, near the reference's, and no gradient is lost to zero."""
    if not all(map(_all_finite, low)):
        return False
    if loss_error(wide[0], low[0]) > tolerance:
        return False
    return all(lost_share(w, x) <= tolerance for w, x in zip(wide[1:], low[1:], strict=True))


def loss_error(wide, low) -> float:
    """Relative error of a loss."""
    return float(abs(np.float64(low) - np.float64(wide)) / max(abs(np.float64(wide)), 1e-30))


def lost_share(wide, low) -> float:
    """Of a gradient's norm, what is zero in half precision and not in the reference."""
    wide, low = np.asarray(wide, np.float64), np.asarray(low, np.float64)
    return ratio(float(np.sum(np.square(wide[low == 0]))), float(np.sum(np.square(wide))))


def flushed_share(wide, low) -> float:
    """The share of a gradient's values that are zero in half precision and not in the reference."""
    wide, low = np.asarray(wide), np.asarray(low)
    return float(np.mean((low == 0) & (wide != 0))) if wide.size else 0.0


def _all_finite(x) -> bool:
    x = np.asarray(jax.device_get(x)) if not isinstance(x, np.ndarray) else x
    return x.dtype.kind not in "fV" or bool(np.isfinite(x).all())


def _not_precision(trace: Trace) -> Finding:
    index = next((i for i, (_, wide) in enumerate(trace.made_bad) if wide), None)
    site = None if index is None else trace.sites[index]
    where = "what goes in is not finite already" if site is None else f"it begins in {_named(site)}"
    return Finding(
        "not_precision",
        site,
        f"The step is not finite in float32 either: {where}. No choice of dtypes repairs it: look at the data, the "
        "parameters and the learning rate.",
    )


def _not_finite(program: Program, trace: Trace, scale: float) -> Finding:
    index = next((i for i, (low, _) in enumerate(trace.made_bad) if low), None)
    if index is None:
        index = next(i for i, reading in enumerate(trace.readings) if reading.non_finite > 0)
    site, reading = trace.sites[index], trace.readings[index]
    if reading.overflow == 0:
        # A division by what became zero, a logarithm of it: the fault is where it became zero.
        flushed = [i for i in range(index) if trace.readings[i].underflow > 0]
        if flushed:
            source = trace.sites[flushed[-1]]
            share = trace.readings[flushed[-1]].underflow / trace.readings[flushed[-1]].size
            return Finding(
                "underflow",
                source,
                f"{share:.1%} of the values of {_named(source)} are too small for {source.dtype} and become zero, so "
                f"that {_named(site)} is not finite. In float32 the step is.",
            )
    largest = _size_before(reading)
    evidence = (
        f"{reading.overflow:.0f} of {reading.size:.0f} values of {_named(site)} pass the largest number of "
        f"{site.dtype}{largest}. In float32 the step is finite."
    )
    if site.direction == "backward" and scale > 1:
        lower = _largest_finite_scale(program, scale)
        if lower is not None:
            return Finding(
                "loss_scale",
                site,
                f"{evidence} With a loss scale of {lower:g} instead of {scale:g} it is finite in half precision too.",
                lower,
            )
    return Finding("overflow", site, evidence)


def _size_before(reading: Reading) -> str:
    exponents = np.nonzero(reading.histogram)[0]
    return f" (they reach 2^{EXPONENTS[exponents[-1]] + 1})" if len(exponents) else ""


def _largest_finite_scale(program: Program, scale: float) -> float | None:
    lower = scale
    while lower > 1:
        lower /= 2
        outputs = Emulator().run(program.jaxpr, program.with_scale(lower))
        if all(_all_finite(p.low) for p in outputs):
            return lower
    return None


def _underflow(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding | None:
    lost = {name: lost_share(w, x) for name, w, x in zip(program.gradients, trace.wide[1:], trace.low[1:], strict=True)}
    if not lost or max(lost.values()) <= tolerance:
        return None
    worst = max(lost, key=lambda name: lost[name])
    flushed = flushed_share(*[outs[1 + program.gradients.index(worst)] for outs in (trace.wide, trace.low)])
    index = next((i for i, r in enumerate(trace.readings) if r.lost_share > tolerance), None)
    site = None if index is None else trace.sites[index]
    where = "" if site is None else f", beginning in {_named(site)}"
    evidence = (
        f"{flushed:.1%} of the gradient of {worst} are too small for half precision and become zero{where}. "
        f"In float32 they are not zero. The loss scale is {scale:g}."
    )
    return Finding("underflow", site, evidence, _smallest_healthy_scale(program, scale, tolerance))


def _smallest_healthy_scale(program: Program, scale: float, tolerance: float) -> float | None:
    higher = scale
    while higher < 2.0**24:
        higher = min(higher * 2**4, 2.0**24)
        outputs = Emulator().run(program.jaxpr, program.with_scale(higher))
        if is_repaired([p.wide for p in outputs], [p.low for p in outputs], tolerance):
            return higher
    return None


def _rounding(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding:
    error = loss_error(trace.wide[0], trace.low[0])
    healthy = Finding(
        "healthy",
        None,
        f"The step is finite, the loss is within {error:.2g} of float32's, and no gradient is lost.",
    )
    if error <= tolerance:
        return healthy
    alone = run(program, scale, isolated=True)
    forward = [i for i, site in enumerate(alone.sites) if site.direction == "forward"]
    worst = max(forward, key=lambda i: alone.readings[i].relative_error)
    site = alone.sites[worst]
    own = alone.readings[worst].relative_error
    return Finding(
        "rounding",
        site,
        f"The loss is off by {error:.2g} of its value, though all is finite and nothing became zero. Most of it comes "
        f"from {_named(site)}: given float32's inputs its result is off by {own:.2g} of its norm.",
    )


def _named(site: Site) -> str:
    return f"{site.operation} in {site.path or 'no module'} ({site.direction}, {site.source})"
