"""Reads from a compiled program the dtypes of its sums over devices and of its parameter updates."""

import dataclasses
import re
from collections.abc import Sequence

from mpjax.plan.dtype_order import NARROWER, compared, dtype_of_bits
from mpjax.plan.hlo import Computation, HloProgram, Instruction, Module, module_of, name_of, shapes_of, stacks_of
from mpjax.plan.runs import dtype_of


_SUMS = ("all-reduce", "reduce-scatter")
_WRITTEN = {"psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter"}
"""The last part of the name of a sum that the traced program contains."""

_ARITHMETIC = {"add", "subtract", "multiply", "divide", "negate", "maximum", "minimum"}
_SAME = {
    **dict.fromkeys(("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape", "transpose"), (0,)),
    **dict.fromkeys(("all-gather", "all-gather-done", "all-gather-start", "broadcast", "pad", "slice"), (0,)),
    **dict.fromkeys(("dynamic-slice", "opt-barrier", "reverse"), (0,)),
    "dynamic-update-slice": (0, 1),
    "select": (1, 2),
}
"""The operands whose values an operation passes on."""
_ROUNDS = ("bitcast-convert", "convert")
_BITS = re.compile(r"\bexponent_bits=(\d+), mantissa_bits=(\d+)")


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over devices of a compiled program.

    Attributes:
      by: "all-reduce" or "reduce-scatter".
      module: the module and pass, from the name of the sum.
      named: whether XLA kept the name. XLA joins several sums, and then keeps no name.
      written: whether the name is of a sum in the traced program. Otherwise the compiler added the sum because an array
        is divided.
      arrays: the dtype and the dimensions of each array.
    """

    by: str
    module: Module
    named: bool
    written: bool
    arrays: tuple[tuple[str, tuple[int, ...]], ...]


def sums_of(program: HloProgram) -> list[Sum]:
    """Lists the sums over devices of floating arrays, each instruction once."""
    found = []
    for computation in program.computations.values():
        if not computation.mentions(*(f" {name}" for name in _SUMS)):
            continue
        for each in computation:
            by = each.opcode.removesuffix("-start")
            if by not in _SUMS or not _adds(program, each):
                continue
            arrays = tuple((dtype, dims) for text, dims in _arrays(computation, each) if (dtype := dtype_of(text)))
            if arrays:
                name = name_of(each)
                written = all(stack.rpartition("/")[2] in _WRITTEN for stack in stacks_of(name))
                found.append(Sum(by, module_of(each), bool(name), written, arrays))
    return found


def updates_of(program: HloProgram, outputs: Sequence[int]) -> list[frozenset[str] | None]:
    """The dtypes of the last arithmetic before each output of a program, by the numbers of `outputs`.

    Casts, selections between the new and the old value, and changes of layout or of single bits are passed over. A
    dtype that they round to is in the set if it is narrower than the dtype of the output. The set is empty if an output
    is an unchanged input, and None if the arithmetic is unknown.
    """
    entry = program.computations[program.entry]
    root, several = entry.root, entry.root.opcode == "tuple"
    search = _Search(program)
    found = []
    for number in outputs:
        output = entry.instructions[root.operands[number]] if several else root
        dtypes, own = search.last((entry,), output, 0, ()), dtype_of(output.type)
        found.append(None if dtypes is None else frozenset(dtype for dtype, by in dtypes if by or _rounds(own, dtype)))
    return found


def _rounds(own: str, dtype: str) -> bool:
    return bool(own) and compared([own], [dtype]) == NARROWER


Dtypes = frozenset[tuple[str, bool]] | None
"""Dtypes on the way to a value, each with True for arithmetic, and False for a cast that is passed over."""


class _Search:
    """A search for the last arithmetic before a value, with a cache of results."""

    def __init__(self, program: HloProgram):
        self.program = program
        self.found: dict[tuple[str, str, int], Dtypes] = {}

    def last(
        self, inside: tuple[Computation, ...], each: Instruction, index: int, callers: tuple[Instruction, ...]
    ) -> Dtypes:
        """The dtypes of the last arithmetic before element `index` of a value.

        Args:
          inside: the computation of the value, behind the computations that call it.
          each: the instruction that computes the value.
          index: the element, if the value is a tuple.
          callers: the instructions that call the computations of `inside`, without the entry.
        """
        key = inside[-1].name, each.name, index
        if key not in self.found:
            self.found[key] = None
            found = self._last(inside, each, index, callers)
            own = each.opcode in _ROUNDS and dtype_of(each.type)
            self.found[key] = found if found is None or not own else found | {(own, False)}
        return self.found[key]

    def _last(
        self, inside: tuple[Computation, ...], each: Instruction, index: int, callers: tuple[Instruction, ...]
    ) -> Dtypes:
        here = inside[-1].instructions

        def of(name: str, index: int = 0) -> Dtypes:
            return self.last(inside, here[name], index, callers) if name in here else None

        dtype = dtype_of(each.type)
        match each.opcode:
            case opcode if opcode in _ARITHMETIC and dtype:
                return frozenset({(dtype, True)})
            case "reduce-precision":
                found = of(each.operands[0])
                return None if found is None else found | {(_of_bits(each), False)}
            case opcode if opcode in _SAME:
                return _together([of(each.operands[number], index) for number in _SAME[opcode]])
            case "concatenate":
                return _together([of(name) for name in each.operands])
            case "add" | "and" | "or" | "bitcast-convert":  # stochastic rounding adds random bits
                known = [found for found in map(of, each.operands) if found]
                return frozenset().union(*known) if known else None
            case "tuple":
                return of(each.operands[index])
            case "get-tuple-element":
                number = each.attributes.partition("index=")[2].partition(",")[0]
                return of(each.operands[0], int(number))
            case "parameter" if callers and callers[-1].opcode != "while":
                outer = inside[:-1]
                given = outer[-1].instructions[callers[-1].operands[int(each.operands[0])]]
                return self.last(outer, given, index, callers[:-1])
            case "parameter" | "constant":
                return frozenset()
            case "fusion" | "call" | "while" | "async-start":
                (called, *_) = each.called("calls", "to_apply", "body")
                computation = self.program.computations[called]
                return self.last((*inside, computation), computation.root, index, (*callers, each))
            case "async-done" | "async-update":
                return of(each.operands[0], index)
        return None


def _of_bits(each: Instruction) -> str:
    exponent, mantissa = _BITS.findall(each.attributes)[0]
    return dtype_of_bits(int(exponent), int(mantissa))


def _together(found: Sequence[Dtypes]) -> Dtypes:
    known = [each for each in found if each is not None]
    return frozenset().union(*known) if len(known) == len(found) else None


def _adds(program: HloProgram, each: Instruction) -> bool:
    return any(program.computations[name].root.opcode == "add" for name in each.called("to_apply"))


def _arrays(computation: Computation, each: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """The type and dimensions of each array that is added."""
    types = [computation.instructions[name].type for name in each.operands if name in computation.instructions]
    return [(text, dims) for text in types for _, dims in shapes_of(text)]
