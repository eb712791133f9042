"""Simulates a step on one device: kernels on one stream, collectives on another, and how much of them can overlap."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from mpjax.plan.events import Event, Start, Work


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one step, in seconds.

    Attributes:
      communication: the sum of the times of all collectives.
      exposed: the part in which the device waits for a collective and computes nothing.
      step: from the first kernel to the last event.
    """

    communication: float
    exposed: float
    step: float


def simulate(events: Iterable[Event], pace: float, exchange: Callable[[Start], float]) -> Timing:
    """Executes events in order.

    A collective begins when the kernels before it are done and the collective before it is. Its own reads and writes
    take memory bandwidth from the kernels, as in the roofline. A collective that takes no time is left out altogether,
    as XLA does if a group has one device.

    Args:
      events: the events of the step.
      pace: seconds per byte that kernels read or write.
      exchange: returns the seconds that a collective takes on the links.
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
    return Timing(communication, exposed, now)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The bytes that devices exchange in one execution of a program.

    Attributes:
      bytes: bytes by collective, of whole arrays.
      hidden: the part of them for which a kernel stands between start and end.
    """

    bytes: Mapping[str, int]
    hidden: Mapping[str, int]

    @property
    def share(self) -> float:
        """Returns the share of the bytes with work in between; 1 without communication."""
        total = sum(self.bytes.values())
        return sum(self.hidden.values()) / total if total else 1.0


def overlap_of(events: Iterable[Event]) -> Overlap:
    """Reads the order of execution: a collective is hidden if a kernel stands between its start and its end."""
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
