"""Parses the HLO text of a compiled program into computations and instructions, with their sizes and modules.

The text is the result of `compiled.as_text()`: XLA's HLO after all passes. Each instruction of the entry computation is
a kernel or a library call that reads its operands from memory and writes its result there, unless it only renames a
value. https://openxla.org/xla/hlo_dumps describes the notation.

XLA keeps the name stack of JAX as the name of an instruction:
`jit(train_step)/transpose(jvp(blocks/0))/mlp/up/dot_general`.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


_BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    **{f"{kind}{bits}": bits for kind in "su" for bits in (2, 4, 8, 16, 32, 64)},
    "f4e2m1fn": 4,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction: a line of a computation.

    Attributes:
      name: the name without its percent sign.
      type: the type of the result as written: `f32[8,3]{1,0}`, or several in parentheses.
      opcode: `fusion`, `custom-call`, `copy`, ... A `fusion-start` is read as a `fusion`.
      operands: names of the operands. For a parameter, its number.
      attributes: the rest of the line, after the operands.
      is_root: whether the instruction is the computation's result.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @functools.cached_property
    def bytes(self) -> int:
        """The size in bytes of the result, with all its arrays."""
        return bytes_of(self.type)

    def called(self, *kinds: str) -> list[str]:
        """Lists the names of the computations that the instruction calls by an attribute in `kinds`; empty for none.

        These attributes are `calls`, `to_apply`, `body`, `condition` and `branch_computations`.
        """
        return [
            name.strip().lstrip("%")
            for kind, names in _CALLED.findall(self.attributes)
            if kind in kinds
            for name in names.strip("{}").split(",")
        ]

    @property
    def trips(self) -> int:
        """The trip count of a while loop; 1 if XLA does not know it."""
        match = _TRIPS.search(self.attributes)
        return int(match[1]) if match else 1

    @property
    def target(self) -> str:
        """The name of the library function that a custom call calls; empty for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: a function of HLO, whose instructions are parsed on first use.

    Attributes:
      name: the name without its percent sign.
      text: the lines between its braces.
    """

    name: str
    text: str

    @functools.cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """The instructions by name, in the order of the text."""
        instructions = (_instruction(line.strip()) for line in self.text.splitlines())
        return {instruction.name: instruction for instruction in instructions if instruction}

    def mentions(self, *words: str) -> bool:
        """True if the text contains one of `words`. Does not parse the text."""
        return any(word in self.text for word in words)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's result: the one marked as root, else the last."""
        return next((instruction for instruction in self if instruction.is_root), list(self)[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameter instructions by parameter number, from 0."""
        # HLO writes the number of a parameter in place of operands.
        return {int(instruction.operands[0]): instruction for instruction in self if instruction.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """The instructions that use each value, by its name, each with the index of the operand that is the value."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self:
            for index, operand in enumerate(instruction.operands):
                users.setdefault(operand, []).append((instruction, index))
        return users

    def operand_bytes(self, instruction: Instruction) -> list[int]:
        """The size in bytes of each operand of an instruction of this computation; 0 for an operand from elsewhere."""
        return [self.instructions[name].bytes if name in self.instructions else 0 for name in instruction.operands]


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A compiled program.

    Attributes:
      computations: the computations by name.
      entry: the name of the entry computation.
    """

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> HloProgram:
    """Splits the HLO text of a program into its computations, whose instructions are parsed on first use.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if line.startswith("}") and name:
            computations[name] = Computation(name, "\n".join(lines))
            name = ""
        elif name:
            lines.append(line)
        elif header := _HEADER.match(line):
            name, lines = header[2], []
            entry = name if header[1] else entry
    if not entry:
        raise ValueError(f"no ENTRY computation in an HLO text that begins {text[:80]!r}")
    return HloProgram(computations, entry)


def _instruction(line: str) -> Instruction | None:
    """Parses a line of a computation; None if it has no instruction."""
    is_root = line.startswith("ROOT ")
    name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    match = _OPCODE.match(rest, end + 1 if rest[end] == " " else end)
    if not match:
        return None
    close = _closing(rest, match.end() - 1)
    inside = rest[match.end() : close]
    opcode, type = match[1], rest[:end]
    if opcode == "fusion-start":  # of a type ((operands), result, u32[]); `fusion-done` waits for the result
        opcode, type = "fusion", type[_closing(type, 1) + 3 : type.rindex(",")]
    operands = (inside,) if opcode == "parameter" else tuple(_OPERAND.findall(inside))
    return Instruction(name.lstrip("%"), type, opcode, operands, rest[close + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the parenthesis at `start`; a ValueError if none does."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    raise ValueError(f"unclosed parenthesis in HLO text: {text[:80]!r}")


def shapes_of(type: str) -> list[tuple[str, tuple[int, ...]]]:
    """Lists the dtype (XLA's name) and the dimensions of each array in an HLO type; unknown dtypes are left out.

    A dynamic dimension `<=8` counts as 8.

    >>> shapes_of("(bf16[8,3]{1,0}, u8[0]{0})")
    [('bf16', (8, 3)), ('u8', (0,))]
    """
    return [
        (dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
        for dtype, sizes in _SHAPE.findall(type)
        if dtype in _BITS or dtype.startswith("f8")
    ]


def bytes_of(type: str) -> int:
    """The size in bytes of all arrays in an HLO type together; an array of an unknown dtype counts as 0 bytes.

    Dtypes of less than a byte are packed, and each array is rounded up to whole bytes.
    """
    total = 0
    for dtype, sizes in shapes_of(type):
        bits = _BITS.get(dtype, 8)
        for size in sizes:
            bits *= size
        total += -(-bits // 8)
    return total


_OP_NAME = re.compile(r'op_name="([^"]*)"')
_WRAPPED = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint)\(([^()]*)\)")
_CALL = re.compile(r"\bjit\([^()]*\)")
_REPEATED = re.compile(r"(transpose\()?(jvp\([^()]+\))(\))?/(?:[^/]+/)*?\2/")
_JOINED = re.compile(r"(?P<around>|.*?/)\((?P<names>.+)\)")
_FUNCTION_SCOPE = re.compile(r"\b\w+\([^()]*\)")
_NO_MODULES = {
    "body",
    "branch_0_fun",
    "branch_1_fun",
    "checkpoint",
    "closed_call",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "eval_jaxpr",
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


def name_of(instruction: Instruction) -> str:
    """The name that JAX gave an instruction: its name stack, `/` and its primitive; empty if XLA kept no name."""
    match = _OP_NAME.search(instruction.attributes)
    return match[1] if match else ""


def module_of(instruction: Instruction) -> Module:
    """The module that an instruction belongs to, and whether it is in the backward pass, read from its name."""
    return module_named(name_of(instruction))


def stacks_of(name: str) -> list[str]:
    """Splits the name of an instruction into the name stacks of the operations that XLA joined in it.

    jaxlib 0.12 names such an instruction after all operations: `jit(f)/(jvp(up)/add:jvp(down)/add)` yields
    `jit(f)/jvp(up)/add` and `jit(f)/jvp(down)/add`. Any other name is returned alone.
    """
    match = _JOINED.fullmatch(name)
    if not match:
        return [name]
    parts, depth = [""], 0
    for character in match["names"]:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [stack for part in parts for stack in stacks_of(match["around"] + part)]


@functools.lru_cache(maxsize=4096)
def module_named(name: str) -> Module:
    """The module and the pass in the name of an operation: `jit(f)/jvp(stem)/conv/add` is in module `stem/conv`.

    If XLA joined several operations in the name, the path is that of the innermost module around all of them, and
    `backward` is true if any of them is in the backward pass. An empty name yields an empty path.
    """
    modules = [_module_of(stack) for stack in stacks_of(name)]
    levels = zip(*(module.path.split("/") for module in modules), strict=False)
    around = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return Module("/".join(level[0] for level in around), any(module.backward for module in modules))


def _module_of(stack: str) -> Module:
    backward = "transpose(" in stack
    while (once := _REPEATED.sub(r"\1\2\3/", stack)) != stack:  # derivative rules repeat the scopes around them
        stack = once
    stack = _CALL.sub("", stack)  # also within a wrapper, as in jvp(jit(f))
    while (inner := _WRAPPED.sub(r"\1", stack)) != stack:
        stack = inner
    *scopes, _ = _FUNCTION_SCOPE.sub("", stack).split("/")  # the last is the operation
    path = [scope for scope in scopes if scope and scope not in _NO_MODULES]
    if "checkpoint" in scopes:  # recomputed operations have the scopes around them twice
        repeated = (n for n in range(len(path) // 2, 0, -1) if path[:n] == path[n : 2 * n])
        path = path[next(repeated, 0) :]
    return Module("/".join(path), backward)
