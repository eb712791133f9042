"""Simulates a step on one device: kernels on one stream, collectives on another, and their overlap."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from mpjax.plan.events import Event, Start, Work


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of one step, in seconds.

    Attributes:
      communication: the sum of the times of all collectives.
      exposed: the part in which the device waits for a collective and computes nothing.
      step: the time from the first kernel to the last event.
    """

    communication: float
    exposed: float
    step: float


def simulate(events: Iterable[Event], pace: float, exchange: Callable[[Start], float]) -> StepTime:
    """Executes events in order.

    A collective begins after the kernels and the collective before it. Its own reads and writes take memory bandwidth
    from the kernels, as in the roofline. A collective that takes no time is left out altogether, as XLA does if a group
    has one device.

    Args:
      events: the events of the step.
      pace: seconds per byte that kernels read or write.
      exchange: returns the seconds of a collective on the links.
    """
    now = free = communication = exposed = 0.0
    ends: dict[str, float] = {}
    for event in events:
        if isinstance(event, Work):
            now += event.moved * pace
        elif isinstance(event, Start):
            seconds = exchange(event)
            if seconds == 0:
                continue
            communication += seconds
            free = ends[event.name] = max(now, free) + seconds
            now += event.moved * pace
        else:
            end = ends.pop(event.name, now)
            exposed += max(0.0, end - now)
            now = max(now, end)
    return StepTime(communication, exposed, now)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The bytes that devices exchange in one execution of a program.

    Attributes:
      bytes: bytes of whole arrays by collective.
      hidden: the part of these bytes with a kernel between the start and the end of the collective.
    """

    bytes: Mapping[str, int]
    hidden: Mapping[str, int]

    @property
    def share(self) -> float:
        """The share of the bytes with work in between; 1 without communication."""
        total = sum(self.bytes.values())
        return sum(self.hidden.values()) / total if total else 1.0


def overlap_of(events: Iterable[Event]) -> Overlap:
    """Counts the bytes of collectives, and of those with a kernel between start and end in the order of execution."""
    begun: dict[str, Start] = {}
    busy: set[str] = set()
    total: dict[str, int] = {}
    hidden: dict[str, int] = {}
    for event in events:
        if isinstance(event, Work):
            busy |= set(begun)
        elif isinstance(event, Start):
            begun[event.name] = event
            total[event.kind] = total.get(event.kind, 0) + event.bytes
        elif start := begun.pop(event.name, None):
            hidden[start.kind] = hidden.get(start.kind, 0) + (start.bytes if start.name in busy else 0)
            busy.discard(start.name)
    return Overlap(total, hidden)
