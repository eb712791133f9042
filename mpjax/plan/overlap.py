"""Finds how much of the communication of a compiled program can run while kernels compute."""

import dataclasses
from collections.abc import Iterable, Mapping

from mpjax.plan.events import Event, Start, Work


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
