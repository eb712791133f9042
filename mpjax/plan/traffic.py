"""Counts the kernels of a compiled program and the bytes that kernels and devices move, and ranks them by module."""

import collections
import dataclasses
import re
from collections.abc import Mapping

from mpjax.plan.hlo import HloProgram, Instruction, module_of
from mpjax.plan.kernels import COLLECTIVES, moved, only_copies, payload
from mpjax.plan.order import counted, order_of
from mpjax.precision.casting.one_equation import LIBRARIES, SourceLine, first_outside


SMALL = 4e6
"""Bytes below which a kernel of a GPU takes about as long as its launch."""

_FRAME = re.compile(r"\bstack_frame_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one execution of a program.

    Attributes:
      bytes: bytes read and written by all kernels.
      kernels: number of kernel launches, including library calls and copies.
      small: number of kernels that move less than `SMALL` bytes.
      copies: bytes read and written by kernels that only copy or transpose.
      collectives: bytes of the whole arrays by collective and dtype (XLA's name): {"all-reduce": {"f32": 1024}}.
      calls: number of custom calls by library function, sorted by name.
    """

    bytes: int
    kernels: int
    small: int
    copies: int
    collectives: Mapping[str, Mapping[str, int]]
    calls: Mapping[str, int]


def traffic_of(program: HloProgram) -> Traffic:
    """Counts kernels, the bytes that they move, collectives and library calls in one execution of a program.

    The body of a loop counts once per trip, or once if XLA does not know the number of trips. A conditional counts as
    the branch that moves the most bytes.
    """
    total = kernels = small = copies = 0
    exchanged: collections.Counter = collections.Counter()
    calls: collections.Counter = collections.Counter()
    for launch, times in counted(order_of(program)):
        computation, instruction = launch.computation, launch.instruction
        if instruction.opcode.endswith("-done"):
            continue
        once = moved(program, computation, instruction)
        size = times * once
        total += size
        small += times if once < SMALL else 0
        kernels += times
        copies += size if only_copies(program, instruction) else 0
        if instruction.target:
            calls[instruction.target] += times
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            for dtype, length in payload(computation, instruction):
                exchanged[kind, dtype] += times * length
    collectives: dict[str, dict[str, int]] = {}
    for (kind, dtype), length in sorted(exchanged.items()):
        collectives.setdefault(kind, {})[dtype] = length
    return Traffic(total, kernels, small, copies, collectives, dict(sorted(calls.items())))


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost, in one step, of the kernels of one kind that come from one source line.

    Attributes:
      bytes: bytes that the kernels read and write.
      kernels: number of launches.
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


def costliest(text: str, program: HloProgram, most: int = 10) -> list[Cost]:
    """Lists the kinds of kernels that move the most bytes, the costliest first.

    Kernels are of one kind if they have the same library function or name, module, pass and source line, except for the
    numbers in names and paths, so that the blocks of a model are together. A fusion has several operations. It belongs
    to the module and line of the operation that XLA names it after.

    Args:
      text: the text of the compiled program.
      program: the same program, parsed.
      most: the number of kinds to list.
    """
    sources = Sources(text)
    sums: collections.Counter = collections.Counter()
    launches: collections.Counter = collections.Counter()
    for launch, times in counted(order_of(program)):
        instruction = launch.instruction
        if instruction.opcode.endswith("-done"):
            continue
        module = module_of(instruction)
        path = re.sub(r"(?<![^/])\d+(?![^/])", "*", module.path)
        key = _kind(instruction), path, module.backward, sources.line_of(instruction)
        sums[key] += times * moved(program, launch.computation, instruction)
        launches[key] += times
    return [Cost(size, launches[key], *key) for key, size in sums.most_common(most)]


def _kind(instruction: Instruction) -> str:
    """The library function of a custom call; the name of any other instruction without its numbers."""
    return instruction.target or re.sub(r"[._]\d+(?=[._]|$)", "", instruction.name)


class Sources:
    """The source lines of a program's instructions.

    Args:
      text: the text of the compiled program.
    """

    def __init__(self, text: str):
        tables = {name: _table(text, name) for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")}
        self._files, self._functions = tables["FileNames"], tables["FunctionNames"]
        self._locations = {number: _fields(row) for number, row in tables["FileLocations"].items()}
        self._frames = {number: _fields(row) for number, row in tables["StackFrames"].items()}
        # The first frame has no caller. XLA writes 1 for it, and numbers that are 1 too large for all others.
        self._offset = self._frames.get(1, {}).get("parent_frame_id", 0)

    def line_of(self, instruction: Instruction) -> str:
        """The innermost source line outside of JAX and other libraries, as `file:line`; empty if XLA kept no lines.

        If all lines are in libraries, it is the innermost.
        """
        match = _FRAME.search(instruction.attributes)
        lines = self._lines(int(match[1])) if match else []
        if not lines:
            return ""
        outside = first_outside(lines, LIBRARIES)
        line = lines[outside] if outside < len(lines) else lines[0]
        return f"{line.file}:{line.line}"

    def _lines(self, number: int) -> list[SourceLine]:
        """The source lines of stack frame `number` and of its callers, innermost first; only those with a file."""
        lines: list[SourceLine] = []
        visited: set[int] = set()
        while number in self._frames and number not in visited:
            visited.add(number)
            frame = self._frames[number]
            location = self._locations.get(frame.get("file_location_id", 0), {})
            file = self._files.get(location.get("file_name_id", 0), "").strip('"')
            function = self._functions.get(location.get("function_name_id", 0), "").strip('"')
            lines.append(SourceLine(file, location.get("line", 0), function))
            number = frame.get("parent_frame_id", 0) - self._offset
        return [line for line in lines if line.file]


def _table(text: str, name: str) -> dict[int, str]:
    """Reads the table `name`, such as `StackFrames`, in the head of an HLO text: rows by number; empty if absent."""
    start = text.find(f"\n{name}\n")
    rows: dict[int, str] = {}
    if start < 0:
        return rows
    for line in text[start + len(name) + 2 :].splitlines():
        number, space, row = line.partition(" ")
        if not space or not number.isdecimal():
            break
        rows[int(number)] = row
    return rows


def _fields(row: str) -> dict[str, int]:
    """Parses the numbers of a row by name: `{file_location_id=1 parent_frame_id=2}`."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
