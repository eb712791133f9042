"""Finds the module and the source line of a kernel in the text of a compiled program.

XLA keeps the name stack of JAX (`jit(train_step)/transpose(jvp(blocks/0))/mlp/up/dot_general`) and, in tables before
the first computation, the Python frames of each instruction.
"""

import functools
import itertools
import re
from typing import NamedTuple

from mpjax.plan.hlo import Instruction
from mpjax.precision.casting.equations import LIBRARIES, SourceLine, first_outside


_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_WRAPPED = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint)\(([^()]*)\)")
_REPEATED = re.compile(r"(transpose\()?(jvp\([^()]+\))(\))?/(?:[^/]+/)*?\2/")
_JOINED = re.compile(r"(?P<around>|.*?/)\((?P<names>.+)\)")
_CALLED = re.compile(r"\b\w+\([^()]*\)")
_NO_MODULES = {
    "body",
    "branch_0_fun",
    "branch_1_fun",
    "checkpoint",
    "closed_call",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "pallas_call",
    "rematted_computation",
    "shard_map",
    "while",
}
"""The scopes that JAX adds to a name stack for calls and loops."""


class Module(NamedTuple):
    """The module that an instruction belongs to.

    Attributes:
      path: attribute names and indices joined by `/`; empty outside of modules.
      backward: True in the backward pass.
    """

    path: str
    backward: bool


def name_of(each: Instruction) -> str:
    """The name stack of an instruction with the operation at its end; empty if XLA kept none."""
    found = _OP_NAME.search(each.attributes)
    return found[1] if found else ""


def module_of(each: Instruction) -> Module:
    """The module of an instruction."""
    return module_named(name_of(each))


def stacks_of(name: str) -> list[str]:
    """Splits a name into its name stacks: itself, or those of all instructions that XLA joined into one.

    jaxlib 0.12 names a joined instruction after all its parts: `jit(f)/(jvp(up)/add:jvp(down)/add)`.
    """
    found = _JOINED.fullmatch(name)
    if not found:
        return [name]
    parts, depth = [""], 0
    for character in found["names"]:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [stack for part in parts for stack in stacks_of(found["around"] + part)]


@functools.lru_cache(maxsize=4096)
def module_named(name: str) -> Module:
    """The module of a name stack with an operation at its end: `jit(f)/jvp(stem)/conv/add`.

    For several instructions that XLA joined into one, it is the innermost module around all of them.
    """
    modules = [_module_of(stack) for stack in stacks_of(name)]
    levels = zip(*(module.path.split("/") for module in modules), strict=False)
    around = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return Module("/".join(level[0] for level in around), any(module.backward for module in modules))


def _module_of(stack: str) -> Module:
    backward = "transpose(" in stack
    while (once := _REPEATED.sub(r"\1\2\3/", stack)) != stack:  # derivative rules repeat the scopes around them
        stack = once
    while (inner := _WRAPPED.sub(r"\1", stack)) != stack:
        stack = inner
    *scopes, _ = _CALLED.sub("", stack).split("/")  # the last is the operation
    path = [scope for scope in scopes if scope and scope not in _NO_MODULES]
    if "checkpoint" in scopes:  # recomputed operations have the scopes around them twice
        repeated = (n for n in range(len(path) // 2, 0, -1) if path[:n] == path[n : 2 * n])
        path = path[next(repeated, 0) :]
    return Module("/".join(path), backward)


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

    def line_of(self, each: Instruction) -> str:
        """The innermost line outside of libraries as `file:line`; else the innermost line; empty if XLA kept none."""
        found = _FRAME.search(each.attributes)
        lines = self._lines(int(found[1])) if found else []
        if not lines:
            return ""
        outside = first_outside(lines, LIBRARIES)
        line = lines[outside] if outside < len(lines) else lines[0]
        return f"{line.file}:{line.line}"

    def _lines(self, number: int) -> list[SourceLine]:
        """The lines of a frame and of its callers, innermost first."""
        lines: list[SourceLine] = []
        seen: set[int] = set()
        while number in self._frames and number not in seen:
            seen.add(number)
            frame = self._frames[number]
            location = self._locations.get(frame.get("file_location_id", 0), {})
            file = self._files.get(location.get("file_name_id", 0), "").strip('"')
            function = self._functions.get(location.get("function_name_id", 0), "").strip('"')
            lines.append(SourceLine(file, location.get("line", 0), function))
            number = frame.get("parent_frame_id", 0) - self._offset
        return [line for line in lines if line.file]


def _table(text: str, name: str) -> dict[int, str]:
    """The rows of a table before the first computation, by number."""
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
    """Parses `{file_location_id=1 parent_frame_id=2}`."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
