"""Finds how much of the communication of a compiled program can run while kernels compute."""

import dataclasses
from collections.abc import Mapping

from mpjax.plan.hlo import Instruction, Program
from mpjax.plan.traffic import COLLECTIVES, FREE, payload


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The bytes that devices exchange in one execution of the entry computation.

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


def overlap_of(program: Program) -> Overlap:
    """Reads the order of the entry computation, which is the order of execution."""
    entry = program.computations[program.entry]
    begun: dict[str, tuple[str, int]] = {}
    busy: set[str] = set()
    total: dict[str, int] = {}
    hidden: dict[str, int] = {}
    for each in entry:
        kind = each.opcode.removesuffix("-start").removesuffix("-done")
        if kind not in COLLECTIVES:
            busy |= set(begun) if _is_work(each) else set()
            continue
        if each.opcode.endswith("-done"):
            start, size = begun.pop(each.operands[0])
            hidden[start] = hidden.get(start, 0) + (size if each.operands[0] in busy else 0)
            continue
        size = sum(size for _, size in payload(entry, each))
        total[kind] = total.get(kind, 0) + size
        if each.opcode.endswith("-start"):
            begun[each.name] = kind, size
    return Overlap(total, hidden)


def _is_work(each: Instruction) -> bool:
    return each.opcode not in FREE and not each.opcode.endswith(("-start", "-done"))
