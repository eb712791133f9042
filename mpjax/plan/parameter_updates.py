"""Compares the arithmetic that updates parameters with the dtypes asked for, and finds which outputs are parameters."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from mpjax.plan.compiled_products import dtype_of
from mpjax.plan.hlo import Computation, HloProgram, Instruction
from mpjax.plan.traced_products import TracedProgram
from mpjax.plan.verdicts import AS_ASKED, NARROWER, UNKNOWN, ReceiptRow, compared, dtype_of_bits, narrowest, together
from mpjax.precision.dtypes import is_floating, path_name, widest
from mpjax.precision.float8.history import is_history


_ARITHMETIC = {"add", "subtract", "multiply", "divide", "negate", "maximum", "minimum"}
_SAME = {
    **dict.fromkeys(("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape", "transpose"), (0,)),
    **dict.fromkeys(("all-gather", "all-gather-done", "all-gather-start", "broadcast", "pad", "slice"), (0,)),
    **dict.fromkeys(("dynamic-slice", "opt-barrier", "reverse"), (0,)),
    "dynamic-update-slice": (0, 1),
    "select": (1, 2),
}
"""The operations that pass on values of operands, and the indices of these operands."""
_ROUNDS = ("bitcast-convert", "convert")
_BITS = re.compile(r"\bexponent_bits=(\d+), mantissa_bits=(\d+)")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that a program returns.

    Attributes:
      output: the index of its output among all outputs of the program, from 0.
      least: the narrowest dtype allowed for the arithmetic of its update.
      dims: its dimensions.
      stored: the dtype that it is stored in.
      returned: the dtype that it is returned in.
    """

    output: int
    least: str
    dims: tuple[int, ...]
    stored: str
    returned: str


def parameters_of(argument: Any, result: Any, least: str = "", *, narrower: bool = False) -> dict[str, Parameter]:
    """The parameters that a function takes and returns, by path, without the histories of float8 scales.

    These are the floating arrays of `returned_of`. Of an argument with `params`, these alone count, and their paths are
    given without `params/`.

    Args:
      argument: the argument with the parameters, or a training state that has `params`; arrays may be abstract.
      result: all results, in the program's order.
      least: the dtype that updates are to be computed in, for parameters of a narrower dtype; empty for their own.
      narrower: whether parameters with a path may be returned in fewer bits than they are given in.
    """
    arrays = returned_of(argument, result, narrower=narrower)
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(result)]
    if any(path.startswith("params/") for path in _names(argument)):
        arrays = {path: entry for path, entry in arrays.items() if path.startswith("params/")}
    return {
        path.removeprefix("params/"): Parameter(
            number,
            str(widest(leaf.dtype, least) if least else leaf.dtype),
            tuple(leaf.shape),
            str(leaf.dtype),
            str(dtypes[number]),
        )
        for path, (leaf, number) in arrays.items()
        if not is_history(path)
    }


def updated_of(
    parameters: Mapping[str, Parameter], traced: TracedProgram, *, differentiated: bool
) -> dict[str, Parameter]:
    """Leaves out the parameters whose output is a gradient, in a new dict, so that the updated ones remain.

    Args:
      parameters: the parameters that a program takes and returns, by path.
      traced: the traced program.
      differentiated: whether it differentiates. If not, an argument that is a single array (its path is empty) is left
        out too.
    """
    return {
        path: parameter
        for path, parameter in parameters.items()
        if not ((traced.gradients and traced.gradients[parameter.output]) or (not path and not differentiated))
    }


def rounded_of(updated: Mapping[str, Parameter], traced: TracedProgram) -> dict[str, str]:
    """The dtypes that a traced program rounds new parameters to, by path; only those narrower than the stored dtypes.

    Without a traced program it is empty.
    """
    if not traced.rounded:
        return {}
    rounded = {
        path: together([traced.rounded[parameter.output], parameter.returned]) for path, parameter in updated.items()
    }
    return {path: dtype for path, dtype in rounded.items() if compared([updated[path].stored], [dtype]) == NARROWER}


def other_argument(params: int, arguments: Any, results: Any, traced: TracedProgram) -> str:
    """Formats the end of a note that names the first argument, other than `params`, that may have the parameters.

    The function returns arrays of that argument in their shape and dtype. The text is empty if there is no such one.

    Args:
      params: the index of the argument that was taken for the parameters.
      arguments: all arguments.
      results: all results.
      traced: the traced program.
    """
    for number, argument in enumerate(arguments):
        parameters = parameters_of(argument, results)
        if number != params and updated_of(parameters, traced, differentiated=True):
            return f"; argument {number} comes back: write params={number} if it has the parameters"
    return ""


def returned_of(argument: Any, result: Any, *, narrower: bool = False) -> dict[str, tuple[Any, int]]:
    """The floating arrays of an argument that a function returns in their shape and dtype: (array, output) by path.

    The output is an index among the leaves of `result`. An array is found there by its path in the argument, which may
    follow the index of the result. With `narrower`, the returned dtype may have fewer bits, unless the argument is a
    single array.
    """
    outputs = list(_names(result).items())
    numbers = {path.partition("/")[2]: number for number, (path, _) in reversed(list(enumerate(outputs)))}
    numbers |= {path: number for number, (path, _) in enumerate(outputs)}
    arrays = {}
    for path, leaf in _names(argument).items():
        number = numbers.get(path)
        if number is not None and is_floating(leaf):
            out = outputs[number][1]
            fewer = narrower and path and is_floating(out) and _has_fewer(out, leaf)
            if out.shape == leaf.shape and (out.dtype == leaf.dtype or fewer):
                arrays[path] = leaf, number
    return arrays


def _has_fewer(out: Any, leaf: Any) -> bool:
    return compared([str(leaf.dtype)], [str(out.dtype)]) == NARROWER


def _names(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path; the path of a single array is empty."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def rows_of_updates(
    updates: Mapping[str, tuple[str, frozenset[str] | None]], rounded: Mapping[str, str] = MappingProxyType({})
) -> list[ReceiptRow]:
    """Builds a receipt's rows of parameter updates, which compare the last arithmetic with the dtype asked for.

    An update in a wider dtype is as asked: it loses nothing. Parameters that do not change have no row.

    Args:
      updates: by path, the dtype asked for and the dtypes of the last arithmetic, which are empty for an unchanged
        parameter, and None if they could not be read.
      rounded: the dtypes that the function itself rounds new parameters to, narrower than their stored dtypes.
    """
    rows = []
    for path, (goal, dtypes) in updates.items():
        if itself := rounded.get(path):
            reason = f"the function itself rounds the new parameter to {itself}"
            rows.append(
                ReceiptRow(path, "update", "update", goal, itself, itself, itself, "XLA loop", 1, NARROWER, reason)
            )
        elif dtypes is None:
            rows.append(
                ReceiptRow(path, "update", "update", goal, "", "", "", "", 1, UNKNOWN, "nothing that could be read")
            )
        elif dtypes:
            actual = narrowest(sorted(dtypes))
            narrower = compared([goal], [actual]) == NARROWER
            reason = f"the update is computed in {actual}, or rounded to it" if narrower else ""
            verdict = NARROWER if narrower else AS_ASKED
            rows.append(
                ReceiptRow(path, "update", "update", goal, actual, actual, actual, "XLA loop", 1, verdict, reason)
            )
    return rows


def updates_of(program: HloProgram, outputs: Sequence[int]) -> list[frozenset[str] | None]:
    """Finds the dtypes of the last arithmetic before each output of a program whose index is in `outputs`, in order.

    Casts, selections between the new and the old value, and changes of layout or of single bits are passed over. A
    dtype that they round to is in the set if it is narrower than the dtype of the output. The set is empty if an output
    is an unchanged input or a constant, and None if the arithmetic is unknown.
    """
    entry = program.computations[program.entry]
    root, several = entry.root, entry.root.opcode == "tuple"
    search = _Search(program)
    last_dtypes = []
    for number in outputs:
        output = entry.instructions[root.operands[number]] if several else root
        dtypes, output_dtype = search.last((entry,), output, 0, ()), dtype_of(output.type)
        last_dtypes.append(
            None if dtypes is None else frozenset(dtype for dtype, by in dtypes if by or _rounds(output_dtype, dtype))
        )
    return last_dtypes


def _rounds(output_dtype: str, dtype: str) -> bool:
    return bool(output_dtype) and compared([output_dtype], [dtype]) == NARROWER


Dtypes = frozenset[tuple[str, bool]] | None
"""Dtypes on the way to a value, each with True for arithmetic or False for a skipped cast; None if unknown."""


class _Search:
    """A search for the last arithmetic before a value, with a cache of results."""

    def __init__(self, program: HloProgram):
        self.program = program
        self.cache: dict[tuple[str, str, int], Dtypes] = {}

    def last(
        self, inside: tuple[Computation, ...], instruction: Instruction, index: int, callers: tuple[Instruction, ...]
    ) -> Dtypes:
        """Finds the dtypes of the last arithmetic before element `index` of a value; None if unknown, as in a cycle.

        Args:
          inside: the computations around the value, outermost first; the last contains it.
          instruction: the instruction that computes the value.
          index: the element, if the value is a tuple.
          callers: the instructions that call the computations of `inside` after the first, in the same order.
        """
        key = inside[-1].name, instruction.name, index
        if key not in self.cache:
            self.cache[key] = None
            dtypes = self._last(inside, instruction, index, callers)
            cast = instruction.opcode in _ROUNDS and dtype_of(instruction.type)
            self.cache[key] = dtypes if dtypes is None or not cast else dtypes | {(cast, False)}
        return self.cache[key]

    def _last(
        self, inside: tuple[Computation, ...], instruction: Instruction, index: int, callers: tuple[Instruction, ...]
    ) -> Dtypes:
        here = inside[-1].instructions

        def of(name: str, index: int = 0) -> Dtypes:
            return self.last(inside, here[name], index, callers) if name in here else None

        dtype = dtype_of(instruction.type)
        match instruction.opcode:
            case opcode if opcode in _ARITHMETIC and dtype:
                return frozenset({(dtype, True)})
            case "reduce-precision":
                dtypes = of(instruction.operands[0])
                return None if dtypes is None else dtypes | {(_of_bits(instruction), False)}
            case opcode if opcode in _SAME:
                return _together([of(instruction.operands[number], index) for number in _SAME[opcode]])
            case "concatenate":
                return _together([of(name) for name in instruction.operands])
            case "add" | "and" | "or" | "bitcast-convert":  # stochastic rounding adds random bits
                known = [dtypes for dtypes in map(of, instruction.operands) if dtypes]
                return frozenset().union(*known) if known else None
            case "tuple":
                return of(instruction.operands[index])
            case "get-tuple-element":
                number = instruction.attributes.partition("index=")[2].partition(",")[0]
                return of(instruction.operands[0], int(number))
            case "parameter" if callers and callers[-1].opcode != "while":
                outer = inside[:-1]
                operand = outer[-1].instructions[callers[-1].operands[int(instruction.operands[0])]]
                return self.last(outer, operand, index, callers[:-1])
            case "parameter" | "constant":
                return frozenset()
            case "fusion" | "call" | "while" | "async-start":
                (called, *_) = instruction.called("calls", "to_apply", "body")
                computation = self.program.computations[called]
                return self.last((*inside, computation), computation.root, index, (*callers, instruction))
            case "async-done" | "async-update" | "fusion-done":
                return of(instruction.operands[0], index)
        return None


def _of_bits(instruction: Instruction) -> str:
    """The dtype that a `reduce-precision` rounds to."""
    exponent, mantissa = _BITS.findall(instruction.attributes)[0]
    return dtype_of_bits(int(exponent), int(mantissa))


def _together(dtype_sets: Sequence[Dtypes]) -> Dtypes:
    """The union of several sets; None if one of them is None."""
    known = [dtypes for dtypes in dtype_sets if dtypes is not None]
    return frozenset().union(*known) if len(known) == len(dtype_sets) else None
