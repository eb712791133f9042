"""One emulated run of a step, with a reading of every operation."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from mpjax.diagnosis.emulate import Emulator, everywhere
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import Reading, Recorder, Site


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


def run(program: Program, scale: float, *, isolated: bool = False, rounds: Callable = everywhere) -> Trace:
    """Emulates the step, with a reading of every operation."""
    recorder = Recorder()
    outputs = Emulator(rounds=rounds, isolated=isolated, recorder=recorder).run(*program.at(scale))
    wide, low = jax.device_get(([p.wide for p in outputs], [p.low for p in outputs]))
    return Trace(recorder.sites, recorder.readings(), wide, low)
