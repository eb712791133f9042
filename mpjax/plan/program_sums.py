"""Compares the sums of a compiled program with the dtypes asked for: over devices, and of many terms on one device."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Sequence

from mpjax.plan.compiled_products import dtype_of
from mpjax.plan.hlo import Computation, HloProgram, Instruction, Module, module_of, name_of, shapes_of, stacks_of
from mpjax.plan.verdicts import (
    AS_ASKED,
    HALF,
    MISSING,
    NARROWER,
    UNCLEAR,
    UNKNOWN,
    ReceiptRow,
    compared,
    counted,
    narrowest,
)
from mpjax.precision.casting.gradient_sums import MANY


_OVER_DEVICES = ("all-reduce", "reduce-scatter")
_WRITTEN = {"psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter"}
"""The names of primitives that add over devices. The name of a sum of the traced program ends with one."""

_ON_DEVICE = {"reduce": "a sum", "reduce-window": "a sum over windows", "scatter": "a scatter"}
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over devices of a compiled program.

    Attributes:
      by: "all-reduce" or "reduce-scatter".
      module: the module and pass, from the name of the sum.
      named: whether XLA kept the name. XLA joins several sums, and then keeps no name.
      written: whether the name is of a sum in the traced program. Otherwise there is no name, or the compiler added the
        sum because an array is divided over devices.
      arrays: the dtype and the dimensions of each array.
    """

    by: str
    module: Module
    named: bool
    written: bool
    arrays: tuple[tuple[str, tuple[int, ...]], ...]


def sums_of(program: HloProgram) -> list[Sum]:
    """Lists the sums over devices of floating arrays, one for each instruction; the body of a loop counts once."""
    sums = []
    for computation in program.computations.values():
        if not computation.mentions(*(f" {name}" for name in _OVER_DEVICES)):
            continue
        for instruction in computation:
            by = instruction.opcode.removesuffix("-start")
            if by not in _OVER_DEVICES or not _adds(program, instruction):
                continue
            arrays = tuple(
                (dtype, dims) for text, dims in _arrays(computation, instruction) if (dtype := dtype_of(text))
            )
            if arrays:
                name = name_of(instruction)
                written = all(stack.rpartition("/")[2] in _WRITTEN for stack in stacks_of(name))
                sums.append(Sum(by, module_of(instruction), bool(name), written, arrays))
    return sums


def _adds(program: HloProgram, instruction: Instruction) -> bool:
    return any(program.computations[name].root.opcode == "add" for name in instruction.called("to_apply"))


def _arrays(computation: Computation, instruction: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """The HLO type and the dimensions of each array that an instruction adds, one for each operand."""
    types = [computation.instructions[name].type for name in instruction.operands if name in computation.instructions]
    return [(text, dims) for text in types for _, dims in shapes_of(text)]


def rows_of_sums(
    traced: Sequence[str], sums: Sequence[Sum], *, least: str | None, parameters: Sequence[tuple[int, ...]]
) -> list[ReceiptRow]:
    """Builds a receipt's rows of sums over devices; equal rows are merged and counted.

    XLA joins sums and keeps no name of them, so the sums of the traced program are compared dtype by dtype: a row for
    each dtype. A sum that the compiler added has its own row, and is compared only if it is a gradient's.

    Args:
      traced: the dtype of each array that the traced program adds.
      sums: the sums of the compiled program.
      least: the policy's `reduce_dtype`; None without a policy.
      parameters: the dimensions of the parameters. A sum with these dimensions that the compiler added is a gradient's.
    """
    requested = set(traced)
    arrays = [(reduction, dtype, dims) for reduction in sums for dtype, dims in reduction.arrays]
    explicit = [
        (reduction, dtype)
        for reduction, dtype, _ in arrays
        if reduction.written or (not reduction.named and dtype in requested)
    ]
    compiled = {dtype for _, dtype in explicit}
    others = compiled - requested

    def row(goal: str, actual: str, verdict: str, reason: str) -> ReceiptRow:
        doing = {(id(reduction), reduction.by) for reduction, dtype in explicit if dtype == actual}
        by = " and ".join(sorted({by for _, by in doing}))
        return ReceiptRow(
            "", "backward", "reduction", goal, actual, actual, actual, by, max(len(doing), 1), verdict, reason
        )

    rows = []
    for dtype in sorted(requested):
        goal = dtype if least is None or compared([least], [dtype]) != NARROWER else least
        actual = dtype if dtype in compiled else narrowest(sorted(others)) if others else ""
        others -= {actual}
        if actual:
            verdict = compared([goal], [actual])
            who = "the function" if goal != dtype else "XLA"
            rows.append(
                row(goal, actual, verdict, "" if verdict == AS_ASKED else f"{who} adds over devices in {actual}")
            )
        else:
            verdict, reason = (UNKNOWN, UNCLEAR) if compiled else (MISSING, "no sum over devices is in the program")
            rows.append(row(goal, "", verdict, reason))
    for dtype in sorted(others):
        verdict = compared([least], [dtype]) if least and not traced else UNKNOWN
        rows.append(row(least or "", dtype, verdict, "" if verdict == AS_ASKED else f"adds over devices in {dtype}"))
    added = [entry for entry in arrays if not (entry[0].written or (not entry[0].named and entry[1] in requested))]
    return counted([*rows, *(_added(*entry, least, parameters) for entry in added)])


def _added(
    reduction: Sum, dtype: str, dims: tuple[int, ...], least: str | None, parameters: Sequence[tuple[int, ...]]
) -> ReceiptRow:
    """Builds the row of an array in a sum that the compiler added, because an operand is divided over devices.

    Only a gradient is compared with `least`, the policy's `reduce_dtype`, which is None without a policy. An array is a
    gradient if its sum is in the backward pass or has no name, and if it has the dimensions of a parameter, or as many
    elements as all parameters together.
    """
    backward = reduction.module.backward or not reduction.named
    every = sum(map(math.prod, parameters))  # XLA may have joined all gradients in one array
    gradient = backward and (_ordered(dims) in set(map(_ordered, parameters)) or math.prod(dims) == every)
    goal = least if gradient and least else dtype
    verdict = compared([goal], [dtype])
    reason = "" if verdict == AS_ASKED else f"the compiler adds gradients over devices in {dtype}"
    if verdict == AS_ASKED and not reduction.named and least and compared([least], [dtype]) == NARROWER:
        verdict, reason = UNKNOWN, f"the compiler joined sums in {dtype}, which may be those of gradients"
    return ReceiptRow(
        path=reduction.module.path,
        direction="backward" if reduction.module.backward or gradient else "forward",
        kind="reduction",
        asked=goal,
        operands=dtype,
        accumulation=dtype,
        result=dtype,
        by=reduction.by,
        count=1,
        verdict=verdict,
        reason=reason,
        note="added by the compiler",
    )


def _ordered(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Sorts dimensions and drops those of size 1, because XLA transposes and reshapes arrays."""
    return tuple(sorted(size for size in dims if size > 1))


def rows_of_casts(traced: Sequence[str], cast: Sequence[str], rounds: Collection[str]) -> list[ReceiptRow]:
    """Builds rows of arrays that the traced function rounds before it adds them over devices in a wider dtype.

    Other arrays have no row.

    Args:
      traced: the dtype of each array that the traced program adds.
      cast: the narrowest dtype that each array was cast to since it was computed; empty for no cast.
      rounds: the dtypes that a policy names, which gradients may be rounded to.
    """
    rows = []
    for wide, narrow in zip(traced, cast, strict=True):
        if narrow and narrow not in rounds and compared([wide], [narrow]) == NARROWER:
            reason = f"the function itself rounds to {narrow} what it then adds over devices in {wide}"
            rows.append(ReceiptRow("", "backward", "reduction", wide, narrow, wide, wide, "cast", 1, NARROWER, reason))
    return counted(rows)


def rows_of_accumulations(program: HloProgram) -> list[ReceiptRow]:
    """Builds rows of the sums on one device of `MANY` terms or more with a result in half precision.

    Equal rows are merged and counted. Other sums have no row.
    """
    return counted(
        [
            _half_sum(instruction)
            for computation in program.computations.values()
            for instruction in _half_sums(program, computation)
        ]
    )


def _half_sums(program: HloProgram, computation: Computation) -> Iterator[Instruction]:
    """Yields the instructions that add `MANY` terms or more with a result in half precision."""
    if not computation.mentions(*(f" {name}(" for name in _ON_DEVICE)):
        return
    for instruction in computation:
        half = instruction.opcode in _ON_DEVICE and dtype_of(instruction.type) in HALF
        adds = (program.computations[name].root.opcode == "add" for name in instruction.called("to_apply"))
        if half and any(adds) and _terms(computation, instruction) >= MANY:
            yield instruction


def _terms(computation: Computation, instruction: Instruction) -> int:
    """The most terms that are added in an element of the result; 0 if unknown, 1 for a scatter of unique indices."""
    if instruction.opcode == "reduce-window":
        window = _WINDOW.search(instruction.attributes)
        return math.prod(map(int, window[1].split("x"))) if window else 0
    if instruction.opcode == "scatter" and "unique_indices=true" in instruction.attributes:
        return 1
    sizes = [math.prod(dims) for name in instruction.operands for _, dims in _shapes(computation, name)]
    of_result = math.prod(shapes_of(instruction.type)[0][1])
    if instruction.opcode == "scatter":  # all updates may be for one element
        return sizes[-1] if sizes else 0
    return sizes[0] // max(of_result, 1) if sizes else 0


def _shapes(computation: Computation, name: str) -> list[tuple[str, tuple[int, ...]]]:
    return shapes_of(computation.instructions[name].type)[:1] if name in computation.instructions else []


def _half_sum(instruction: Instruction) -> ReceiptRow:
    module, dtype = module_of(instruction), dtype_of(instruction.type)
    return ReceiptRow(
        path=module.path,
        direction="backward" if module.backward else "forward",
        kind="accumulation",
        asked="float32",
        operands=dtype,
        accumulation=dtype,
        result=dtype,
        by=instruction.opcode,
        count=1,
        verdict=NARROWER,
        reason=f"{_ON_DEVICE[instruction.opcode]} adds many terms in {dtype}",
    )
