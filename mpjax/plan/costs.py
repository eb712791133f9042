"""Ranks the kernels of a compiled step by the bytes that they move, with the module and source line of each."""

import collections
import dataclasses
import re

from mpjax.plan.hlo import Instruction, Program
from mpjax.plan.kernels import moved
from mpjax.plan.order import counted, order_of
from mpjax.plan.source import Sources, module_of


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the kernels of one kind cost that come from one source line, in one step.

    Attributes:
      bytes: bytes that they read and write.
      kernels: how often they are launched.
      kind: the library function, or XLA's name of the fusion: `input_reduce_fusion`, `loop_add_fusion`, ...
      module: the path of the module with `*` for indices: `blocks/*/mlp/up`; empty outside of modules.
      backward: True in the backward pass.
      line: `file:line`; empty if XLA kept none.
    """

    bytes: int
    kernels: int
    kind: str
    module: str
    backward: bool
    line: str


def costliest(text: str, program: Program, most: int = 10) -> list[Cost]:
    """Returns the kinds of kernels that move the most bytes, the costliest first.

    Kernels that differ only in the index of their block are one kind. A fusion belongs to the module and the line of
    the operation that XLA names it after, which is one of several in it.

    Args:
      text: the text of the compiled program.
      program: the same, parsed.
      most: how many kinds to return.
    """
    sources = Sources(text)
    sums: collections.Counter = collections.Counter()
    launches: collections.Counter = collections.Counter()
    for launch, times in counted(order_of(program)):
        each = launch.instruction
        if each.opcode.endswith("-done"):
            continue
        module = module_of(each)
        path = re.sub(r"(?<![^/])\d+(?![^/])", "*", module.path)
        key = _kind(each), path, module.backward, sources.line_of(each)
        sums[key] += times * moved(program, launch.computation, each)
        launches[key] += times
    return [Cost(size, launches[key], *key) for key, size in sums.most_common(most)]


def _kind(each: Instruction) -> str:
    """Returns the library function of an instruction, or its name without numbers."""
    return each.target or re.sub(r"[._]\d+(?=[._]|$)", "", each.name)
