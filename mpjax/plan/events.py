"""Lists the events of one device in a step: it runs kernels, starts collectives, and waits for them."""

import dataclasses
from collections.abc import Iterable, Iterator

from mpjax.plan.hlo import HloProgram, Instruction
from mpjax.plan.kernels import COLLECTIVES, moved, payload
from mpjax.plan.order import Launch, WhileLoop, order_of


@dataclasses.dataclass(frozen=True)
class Work:
    """Consecutive kernels.

    Attributes:
      moved: bytes that the kernels read and write.
    """

    moved: int


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a collective.

    Attributes:
      name: the name that a `Wait` refers to.
      kind: "all-reduce", "all-gather", ...
      arrays: dtype and bytes of each whole array that is exchanged.
      moved: bytes that the collective reads and writes in the device's memory.
      instruction: the instruction, which names the devices that take part; see `mpjax.plan.groups`.
    """

    name: str
    kind: str
    arrays: tuple[tuple[str, int], ...]
    moved: int
    instruction: Instruction

    @property
    def bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(size for _, size in self.arrays)


@dataclasses.dataclass(frozen=True)
class Wait:
    """The end of a collective: later events need its result.

    Attributes:
      name: the name of the `Start`.
    """

    name: str


Event = Work | Start | Wait


def events_of(program: HloProgram) -> list[Event]:
    """Lists the events of one execution. Events of a loop repeat for each trip, and consecutive `Work` is merged.

    A collective that is one instruction, without `-start` and `-done`, has its `Wait` directly after its `Start`.
    """
    return list(_merged(_events(program, order_of(program))))


def _events(program: HloProgram, order: tuple[Launch | WhileLoop, ...]) -> Iterator[Event]:
    for launch in order:
        if isinstance(launch, WhileLoop):
            body = list(_merged(_events(program, launch.body)))
            yield from _repeated(body, launch.trips)
            continue
        each = launch.instruction
        kind = each.opcode.removesuffix("-start").removesuffix("-done")
        if each.opcode.endswith("-done"):
            if kind in COLLECTIVES:
                yield Wait(each.operands[0])
            continue
        size = moved(program, launch.computation, each)
        if kind not in COLLECTIVES:
            yield Work(size)
            continue
        yield Start(each.name, kind, tuple(payload(launch.computation, each)), size, each)
        if kind == each.opcode:
            yield Wait(each.name)


def _repeated(body: list[Event], trips: int) -> list[Event]:
    if all(isinstance(event, Work) for event in body):  # a loop of kernels alone may run millions of times
        return [Work(event.moved * trips) for event in body if isinstance(event, Work)]
    return body * trips


def _merged(events: Iterable[Event]) -> Iterator[Event]:
    work = None
    for event in events:
        if isinstance(event, Work):
            work = Work(event.moved + (work.moved if work else 0))
            continue
        if work:
            yield work
        work = None
        yield event
    if work:
        yield work
