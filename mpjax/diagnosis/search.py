"""The smallest set of modules to keep in float32 so that a step is repaired: delta debugging on the emulated step.

Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002 (IEEE TSE 28(2)), section 3.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.verdict import Trace, is_repaired
from mpjax.precision.dtypes import HALF


class Repair(NamedTuple):
    """Modules to keep in float32.

    Attributes:
      paths: theirs; no proper subset repairs the step.
      tried: how many sets were run.
    """

    paths: tuple[str, ...]
    tried: int


def smallest_repair(program: Program, trace: Trace, scale: float, tolerance: float) -> Repair | None:
    """The modules whose rounding, left out, repairs the step; None if leaving out all of it does not.

    Args:
      program: the step.
      trace: what is wrong with it.
      scale: the loss scale.
      tolerance: as of `is_repaired`.
    """
    paths = [path for path in program.paths if any(_rounds(trace, path))]
    runs = _masked(program, paths, scale)
    tried: dict[frozenset[str], bool] = {}

    def repairs(kept: Sequence[str]) -> bool:
        key = frozenset(kept)
        if key not in tried:
            tried[key] = is_repaired(trace.wide, runs(key), tolerance)
        return tried[key]

    suspects = _ranked(trace, paths)
    enough = _first_enough(suspects, repairs)
    if enough is None:
        return None
    found = minimal(enough, repairs)
    return Repair(tuple(path for path in paths if path in found), len(tried))


def minimal(items: Sequence[str], repairs: Callable[[Sequence[str]], bool]) -> list[str]:
    """A subset of `items`, which repair, that does too, and of which no item can be left out."""
    kept, parts = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[start : start + size] for start in range(0, len(kept), size)]
        rest = next((r for chunk in chunks for r in [[x for x in kept if x not in chunk]] if r and repairs(r)), None)
        if chunk := next((c for c in chunks if repairs(c)), None):
            kept, parts = chunk, 2
        elif rest is not None:
            kept, parts = rest, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


def _first_enough(suspects: list[str], repairs: Callable) -> list[str] | None:
    """The shortest beginning of a ranked list that repairs, by doubling."""
    count = 1
    while count < len(suspects):
        if repairs(suspects[:count]):
            return suspects[:count]
        count *= 2
    return suspects if suspects and repairs(suspects) else None


def _rounds(trace: Trace, path: str):
    return (site.path == path and site.dtype in HALF for site in trace.sites)


def _ranked(trace: Trace, paths: list[str]) -> list[str]:
    """Paths by how much went wrong in them: what became inf, what became zero, and how far off they are."""
    harm = dict.fromkeys(paths, (0.0, 0.0, 0.0))
    for site, reading in zip(trace.sites, trace.readings, strict=True):
        if site.path in harm:
            worst = harm[site.path]
            mine = (
                reading.overflow / reading.size if reading.size else 0.0,
                reading.lost_share,
                reading.relative_error,
            )
            harm[site.path] = max(worst[0], mine[0]), max(worst[1], mine[1]), max(worst[2], mine[2])
    return sorted(paths, key=lambda path: harm[path], reverse=True)


def _masked(program: Program, paths: list[str], scale: float) -> Callable[[frozenset[str]], list]:
    """Modules in float32 to the outputs of the step, compiled once for all sets."""
    index = {path: i for i, path in enumerate(paths)}

    @jax.jit
    def run(rounds, inputs):
        def rounds_at(path: str):
            return rounds[index[path]] if path in index else True

        return [pair.low for pair in Emulator(rounds=rounds_at).run(program.jaxpr, inputs)]

    def outputs(kept: frozenset[str]) -> list:
        return jax.device_get(run(jnp.array([path not in kept for path in paths]), program.with_scale(scale)))

    return outputs
