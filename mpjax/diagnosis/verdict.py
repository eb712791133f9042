"""From what was seen to what is wrong: overflow, underflow, rounding, the loss scale, or not precision at all.

What counts as wrong:

- Overflow: the half-precision step is not finite, float32's is.
- Underflow: rounding to zero took more than `tolerance` of a gradient's norm. A gradient may be zero for want of bits
  too, where terms cancel; what counts is what is not zero with as many bits and no smallest number.
- Rounding: the loss is off by more than `tolerance`, and some module, given float32's inputs, is off by more than
  `tolerance` of its result's norm; or the loss is off by more than half, so that not one of its bits is right. The
  error of a small loss alone says little: that of a network that is sure of its answers is small because large numbers
  cancel, and many harmless roundings show in it.
- Not precision: float32's step is not finite either.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import EXPONENTS, Reading, Recorder, Site, ratio


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


def find(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding:
    """What is wrong with a step, from its emulation with errors carried on."""
    if not all_finite(trace.wide):
        return _not_precision(trace)
    if not all_finite(trace.low):
        return _not_finite(program, trace, scale, tolerance)
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


def _not_precision(trace: Trace) -> Finding:
    index = next((i for i, reading in enumerate(trace.readings) if reading.reference_begins > 0), None)
    site = None if index is None else trace.sites[index]
    where = "what goes in is not finite already" if site is None else f"it begins in {_named(site)}"
    return Finding(
        "not_precision",
        site,
        f"The step is not finite in float32 either: {where}. No choice of dtypes repairs it: look at the data, the "
        "parameters and the learning rate.",
    )


def _not_finite(program: Program, trace: Trace, scale: float, tolerance: float) -> Finding:
    index = next((i for i, reading in enumerate(trace.readings) if reading.begins > 0), None)
    if index is None:
        return Finding("overflow", None, "The step is not finite in half precision. In float32 it is.")
    site, reading = trace.sites[index], trace.readings[index]
    if reading.overflow == 0 and reading.flushed >= 0:
        # A division by what became zero, a logarithm of it: the fault is where it became zero.
        source, flushed = trace.sites[reading.flushed], trace.readings[reading.flushed]
        return Finding(
            "underflow",
            source,
            f"{flushed.underflow / flushed.size:.1%} of the values of {_named(source)} are too small for "
            f"{source.dtype} and become zero, so that {_named(site)} is not finite. In float32 the step is.",
        )
    evidence = (
        f"{reading.non_finite:.0f} of {reading.size:.0f} values of {_named(site)} pass the largest number of "
        f"{site.dtype}{_size_before(reading)}. In float32 the step is finite."
    )
    if site.direction == "backward":
        lower = _healthy_scale(program, trace, scale, tolerance, 0.5)
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


def _healthy_scale(program: Program, trace: Trace, scale: float, tolerance: float, factor: float) -> float | None:
    """The first loss scale between 1 and 2^24 with which a step is healthy, going from `scale` by a factor."""
    wide = [np.float64(w) / scale for w in trace.wide]
    while 1 <= (scale := scale * factor) <= 2.0**24:
        if is_repaired(program, wide, scale, tolerance):
            return scale
    return None


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
    worst = max(forward, key=lambda i: alone.readings[i].relative_error)
    site, own = alone.sites[worst], alone.readings[worst].relative_error
    if own <= tolerance and error <= 0.5:
        evidence = (
            f"The step is finite and no gradient is lost. The loss is off by {error:.2g} of its value, by roundings "
            f"in all modules: none is off by more than {own:.2g} of its norm when given float32's inputs."
        )
        return Finding("healthy", None, evidence)
    return Finding(
        "rounding",
        site,
        f"The loss is off by {error:.2g} of its value, though all is finite and nothing became zero. Most of it comes "
        f"from {_named(site)}: given float32's inputs its result is off by {own:.2g} of its norm.",
    )


def _named(site: Site) -> str:
    return f"{site.operation} in {site.path or 'no module'} ({site.direction}, {site.source})"
