"""Counts the kernels of a compiled program, the bytes they read and write, and the bytes that devices exchange."""

import collections
import dataclasses
from collections.abc import Mapping

from mpjax.plan.hlo import Program
from mpjax.plan.kernels import COLLECTIVES, moved, only_copies, payload
from mpjax.plan.order import counted, order_of


SMALL = 4e6
"""Bytes below which a kernel of a GPU takes about as long as its launch."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one execution of a program.

    Attributes:
      bytes: bytes read and written by all kernels.
      kernels: number of kernel launches, including library calls and copies.
      small: number of them that move less than `SMALL` bytes.
      copies: bytes read and written by kernels that only copy or transpose.
      collectives: bytes of the whole array by collective and dtype, such as {"all-reduce": {"f32": 1024}}.
      calls: number of calls by library function.
    """

    bytes: int
    kernels: int
    small: int
    copies: int
    collectives: Mapping[str, Mapping[str, int]]
    calls: Mapping[str, int]


def traffic_of(program: Program) -> Traffic:
    """Counts the traffic of the entry computation. Loops count by their trip count, or once if it is unknown."""
    total = kernels = small = copies = 0
    exchanged: collections.Counter = collections.Counter()
    calls: collections.Counter = collections.Counter()
    for launch, times in counted(order_of(program)):
        computation, each = launch.computation, launch.instruction
        if each.opcode.endswith("-done"):
            continue
        once = moved(program, computation, each)
        size = times * once
        total += size
        small += times if once < SMALL else 0
        kernels += times
        copies += size if only_copies(program, each) else 0
        if each.target:
            calls[each.target] += times
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            for dtype, length in payload(computation, each):
                exchanged[kind, dtype] += times * length
    collectives: dict[str, dict[str, int]] = {}
    for (kind, dtype), length in sorted(exchanged.items()):
        collectives.setdefault(kind, {})[dtype] = length
    return Traffic(total, kernels, small, copies, collectives, dict(sorted(calls.items())))
