"""Predicts the time of a step on one device from its events: kernels on one stream, collectives on another."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from mpjax.plan.hlo import HloProgram, Instruction
from mpjax.plan.kernels import COLLECTIVES, moved, payload
from mpjax.plan.order import Launch, WhileLoop, order_of


@dataclasses.dataclass(frozen=True)
class Work:
    """One or more kernels, without a collective that starts or ends between them.

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
      arrays: dtype (XLA's name) and bytes of each whole array that is exchanged.
      moved: bytes that the collective reads and writes in the device's memory.
      instruction: the instruction, which names the devices that take part; see `mpjax.plan.communication`.
    """

    name: str
    kind: str
    arrays: tuple[tuple[str, int], ...]
    moved: int
    instruction: Instruction

    @property
    def bytes(self) -> int:
        """The bytes of all arrays that are exchanged."""
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
    """Lists the events of one execution of a program, in order.

    Events of a loop repeat for each trip, and consecutive `Work` is merged. A collective that is one instruction,
    without `-start` and `-done`, has its `Wait` directly after its `Start`.
    """
    return list(_merged(_events(program, order_of(program))))


def _events(program: HloProgram, order: tuple[Launch | WhileLoop, ...]) -> Iterator[Event]:
    for launch in order:
        if isinstance(launch, WhileLoop):
            body = list(_merged(_events(program, launch.body)))
            yield from _repeated(body, launch.trips)
            continue
        instruction = launch.instruction
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if instruction.opcode.endswith("-done"):
            if kind in COLLECTIVES:
                yield Wait(instruction.operands[0])
            continue
        size = moved(program, launch.computation, instruction)
        if kind not in COLLECTIVES:
            yield Work(size)
            continue
        yield Start(instruction.name, kind, tuple(payload(launch.computation, instruction)), size, instruction)
        if kind == instruction.opcode:
            yield Wait(instruction.name)


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
    """Predicts the time of a step from its events, in order. Nothing runs.

    A collective begins when the kernels and the collective before it have ended, and runs beside the kernels after it,
    up to its `Wait`. Its own reads and writes take memory bandwidth from the kernels, as in the roofline. A collective
    that takes no time is left out with its reads and writes, as XLA leaves it out if a group has one device.

    Args:
      events: the events of the step.
      pace: seconds per byte that kernels read or write.
      exchange: `(start) -> seconds`, the time of a collective on the links between devices.
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


def overlap_of(events: Iterable[Event]) -> float:
    """The fraction of the exchanged bytes whose collective has a kernel between its start and its end.

    It is 1 if nothing is exchanged.
    """
    ended = list(_ended(events))
    total = sum(start.bytes for start, _ in ended)
    return sum(start.bytes for start, beside in ended if beside) / total if total else 1.0


def exposed_in_any_case(events: Iterable[Event], pace: float, exchange: Callable[[Start], float]) -> float:
    """The seconds for which a device waits even if all that can be hidden is: for collectives without a kernel between.

    Such a collective has no kernel between its start and its end. Its own reads and writes count as kernels.

    Args:
      events: the events of the step.
      pace: seconds per byte that kernels read or write.
      exchange: `(start) -> seconds`, as in `simulate`.
    """
    return sum(max(0.0, exchange(start) - start.moved * pace) for start, beside in _ended(events) if not beside)


def _ended(events: Iterable[Event]) -> Iterator[tuple[Start, bool]]:
    """Yields each collective that has an end, and whether a kernel stands between its start and its end."""
    pending: dict[str, Start] = {}
    busy: set[str] = set()
    for event in events:
        if isinstance(event, Work):
            busy |= set(pending)
        elif isinstance(event, Start):
            pending[event.name] = event
        elif start := pending.pop(event.name, None):
            yield start, start.name in busy
            busy.discard(start.name)
