"""Reads from a compiled program which sums of many terms on one device it adds up in half precision."""

import math
import re
from collections.abc import Iterator

from mpjax.plan.dtype_order import NARROWER
from mpjax.plan.hlo import Computation, Instruction, Program, shapes_of
from mpjax.plan.runs import dtype_of
from mpjax.plan.source import module_of
from mpjax.plan.verdicts import Row, counted
from mpjax.precision.casting.gradient_sums import MANY
from mpjax.precision.dtypes import HALF


_HALF = tuple(map(str, HALF))
_SUMS = {"reduce": "a sum", "reduce-window": "a sum over windows", "scatter": "a scatter"}
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")


def rows_of_accumulations(program: Program) -> list[Row]:
    """Returns a row for each sum of many terms whose accumulator is in half precision; none for those in float32."""
    return counted(
        [_row(each) for computation in program.computations.values() for each in _sums(program, computation)]
    )


def _sums(program: Program, computation: Computation) -> Iterator[Instruction]:
    if not computation.mentions(*(f" {name}(" for name in _SUMS)):
        return
    for each in computation:
        half = each.opcode in _SUMS and dtype_of(each.type) in _HALF
        adds = (program.computations[name].root.opcode == "add" for name in each.called("to_apply"))
        if half and any(adds) and _terms(computation, each) >= MANY:
            yield each


def _terms(computation: Computation, each: Instruction) -> int:
    """Returns how many terms an element of the result may have."""
    if each.opcode == "reduce-window":
        found = _WINDOW.search(each.attributes)
        return math.prod(map(int, found[1].split("x"))) if found else 0
    if each.opcode == "scatter" and "unique_indices=true" in each.attributes:
        return 1
    sizes = [math.prod(dims) for name in each.operands for _, dims in _shapes(computation, name)]
    of_result = math.prod(shapes_of(each.type)[0][1])
    if each.opcode == "scatter":  # all updates may be for one element
        return sizes[-1] if sizes else 0
    return sizes[0] // max(of_result, 1) if sizes else 0


def _shapes(computation: Computation, name: str) -> list[tuple[str, tuple[int, ...]]]:
    return shapes_of(computation.instructions[name].type)[:1] if name in computation.instructions else []


def _row(each: Instruction) -> Row:
    module, dtype = module_of(each), dtype_of(each.type)
    return Row(
        path=module.path,
        direction="backward" if module.backward else "forward",
        kind="accumulation",
        asked="float32",
        operands=dtype,
        accumulation=dtype,
        result=dtype,
        by=each.opcode,
        count=1,
        verdict=NARROWER,
        reason=f"{_SUMS[each.opcode]} adds many terms in {dtype}",
    )
