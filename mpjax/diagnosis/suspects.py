"""Finds the module at fault among several with the same symptom, by running the step without rounding in each."""

import operator
from collections.abc import Iterable, Sequence

from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.health import Reference, outputs_of
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import Reading, Site


SUSPECTS = 8
"""The number of modules to run without rounding, one at a time."""


def at_fault(
    seen: Sequence[tuple[Site, Reading]], program: Program, scale: float, reference: Reference
) -> tuple[Site, Reading] | None:
    """The first reading of the module that repairs the step if it does not round; by default the first of all.

    In half precision it is the first of all, because it causes the later overflows. In float8, small values underflow
    in healthy modules too.

    Args:
      seen: readings of possible faults, in program order.
      program: the step.
      scale: the loss scale.
      reference: the float32 step to compare with.

    Returns:
      A site and its reading; None if there are no readings.
    """
    paths = list(dict.fromkeys(site.path for site, _ in seen))
    if len(paths) > 1 and reference.without_float8 is not None:
        left, path = culprit(paths, program, scale, reference)
        if left <= reference.tolerance:
            return next(entry for entry in seen if entry[0].path == path)
    return next(iter(seen), None)


def culprit(paths: Iterable[str], program: Program, scale: float, reference: Reference) -> tuple[float, str]:
    """Finds the first of at most eight modules that repairs the step if it does not round, or else the best.

    Among equals it is the first.

    Args:
      paths: module paths, the most suspicious first; at least one.
      program: the step.
      scale: the loss scale.
      reference: the float32 step to compare with.

    Returns:
      The distance of the step from the reference, as in `Reference.fault`, and the path.
    """
    tried: list[tuple[float, str]] = []
    for path in list(paths)[:SUSPECTS]:
        kept = Emulator(rounds=lambda other, path=path: other != path, reference=False)
        tried.append((reference.fault(outputs_of(kept, program, scale), scale), path))
        if tried[-1][0] <= reference.tolerance:
            return tried[-1]
    return min(tried, key=operator.itemgetter(0))
