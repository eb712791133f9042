"""Counts the bytes that the update of a compiled step moves: all kernels between the gradients and the new state."""

from collections.abc import Iterator, Sequence

from mpjax.plan.hlo import Computation, Instruction, Program
from mpjax.plan.kernels import COLLECTIVES, FREE, moved
from mpjax.plan.source import name_of


_ENDS = ("parameter", "constant", "while", "conditional")


def update_bytes(program: Program, outputs: Sequence[int]) -> int:
    """Returns the bytes that kernels read and write to compute outputs of a program, such as new parameters.

    Kernels of what is differentiated are not counted, nor sums over devices. Of a loop over steps, one step counts.

    Args:
      program: the compiled program.
      outputs: the numbers of the outputs.
    """
    entry = program.computations[program.entry]
    starts = [_source(program, entry, entry.root, number) for number in outputs]
    kernels: dict[tuple[str, str], tuple[Computation, Instruction]] = {}
    for computation, each in starts:
        for kernel in _before(computation, each, kernels):
            kernels[computation.name, kernel.name] = computation, kernel
    return sum(moved(program, computation, each) for computation, each in kernels.values())


def _source(
    program: Program, computation: Computation, each: Instruction, index: int
) -> tuple[Computation, Instruction]:
    """Returns the instruction that computes element `index` of a value, and its computation: inside of a loop if so."""
    while True:
        match each.opcode:
            case "tuple":
                each, index = computation.instructions[each.operands[index]], 0
            case "get-tuple-element":
                index = int(each.attributes.partition("index=")[2].partition(",")[0])
                each = computation.instructions[each.operands[0]]
            case "while" | "call":
                computation = program.computations[each.called("body", "to_apply")[0]]
                each = computation.root
            case _:
                return computation, each


def _before(computation: Computation, each: Instruction, known: dict) -> Iterator[Instruction]:
    """Yields the kernels that a value depends on, back to arguments, loops, collectives and what is differentiated."""
    waiting, seen = [each], set()
    while waiting:
        each = waiting.pop()
        if each.name in seen or each.opcode in _ENDS or _is_given(each):
            continue
        seen.add(each.name)
        if each.opcode not in FREE and not each.opcode.endswith("-done"):
            if (computation.name, each.name) in known:
                continue
            yield each
        waiting += [computation.instructions[name] for name in each.operands if name in computation.instructions]


def _is_given(each: Instruction) -> bool:
    return "jvp(" in name_of(each) or each.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES
