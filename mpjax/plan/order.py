"""Lists the launches of a device in one execution of a program, in order: kernels, library calls and collectives."""

import dataclasses
from collections.abc import Iterator

from mpjax.plan.hlo import Computation, HloProgram, Instruction
from mpjax.plan.kernels import FREE, moved


@dataclasses.dataclass(frozen=True)
class Launch:
    """An instruction that a device launches, or the `-done` of an asynchronous one, for which it waits.

    Attributes:
      instruction: the instruction.
      computation: the computation that contains it.
    """

    instruction: Instruction
    computation: Computation


@dataclasses.dataclass(frozen=True)
class WhileLoop:
    """A while loop.

    Attributes:
      trips: number of executions of the body; 1 if XLA does not know it.
      body: the launches of each execution.
    """

    trips: int
    body: "tuple[Launch | WhileLoop, ...]"


def order_of(program: HloProgram) -> tuple[Launch | WhileLoop, ...]:
    """Lists the launches of the entry computation and of the computations that it calls, in order of execution.

    This is the order of the text of a scheduled program. A loop is one `WhileLoop` with the launches of its body. The
    branch that a conditional takes is unknown, so the list has the branch that moves the most bytes.
    """
    return tuple(_launches(program, program.computations[program.entry]))


def counted(order: tuple[Launch | WhileLoop, ...], times: int = 1) -> Iterator[tuple[Launch, int]]:
    """Yields each launch once, with the number of its executions: the product of the trips of the loops around it.

    Args:
      order: the launches and loops.
      times: the number of executions of `order` itself.
    """
    for launch in order:
        if isinstance(launch, WhileLoop):
            yield from counted(launch.body, times * launch.trips)
        else:
            yield launch, times


def _launches(program: HloProgram, computation: Computation) -> Iterator[Launch | WhileLoop]:
    """Yields the launches of a computation, as `order_of`; opcodes in `FREE` or that end with `-update` have none."""
    for instruction in computation:
        kind = instruction.opcode
        if kind in FREE or kind.endswith("-update"):
            continue
        if kind == "while":
            (body,) = instruction.called("body")
            yield WhileLoop(instruction.trips, tuple(_launches(program, program.computations[body])))
        elif kind in ("call", "async-start"):
            for called in instruction.called("to_apply", "calls"):
                yield from _launches(program, program.computations[called])
        elif kind == "conditional":
            yield from _largest(program, instruction)
        else:
            yield Launch(instruction, computation)


def _largest(program: HloProgram, conditional: Instruction) -> tuple[Launch | WhileLoop, ...]:
    """The launches of the branch of a conditional that moves the most bytes."""
    names = conditional.called("branch_computations", "to_apply")
    branches = [tuple(_launches(program, program.computations[name])) for name in names]
    return max(branches, key=lambda branch: _moved(program, branch), default=())


def _moved(program: HloProgram, order: tuple[Launch | WhileLoop, ...]) -> int:
    """Counts the bytes that all launches read and write, those of a loop once for each trip."""
    return sum(
        times * moved(program, launch.computation, launch.instruction)
        for launch, times in counted(order)
        if not launch.instruction.opcode.endswith("-done")
    )
