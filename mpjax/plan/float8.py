"""Counts what float8 saves and costs in a compiled step, layer by layer: time of products, and of conversions.

A product in float8 takes half the time at the data sheets' rates. Finding the largest value of an operand and casting
it are kernels of their own, which move bytes and are launched.
"""

import collections
import dataclasses
import math
import re
from typing import Any

from mpjax.plan.devices import Gpu
from mpjax.plan.hlo import Computation, Instruction, Program, shapes_of
from mpjax.plan.kernels import moved
from mpjax.plan.order import counted, order_of
from mpjax.plan.roofline import COPIES, LAUNCH, PRODUCTS
from mpjax.plan.source import module_of
from mpjax.precision.casting.flops import dtype_in, product_flops
from mpjax.precision.casting.jaxprs import scope_of
from mpjax.precision.casting.walk import bodies
from mpjax.precision.dtypes import is_floating


@dataclasses.dataclass(frozen=True)
class Layer:
    """What float8 saves and costs in the layers of one path, in one step.

    Attributes:
      module: the path with `*` for indices.
      saved: seconds that the products take less than in bfloat16.
      spent: seconds of the kernels that find scales and cast, at most: what XLA fused with them is counted too.
      kernels: how many kernels these are.
    """

    module: str
    saved: float
    spent: float
    kernels: int


def layers_of(jaxpr: Any, program: Program, gpu: Gpu) -> list[Layer]:
    """Returns the layers that multiply in float8, by path.

    Args:
      jaxpr: the traced step.
      program: the compiled step.
      gpu: the GPU that it is compiled for.
    """
    saved: dict[str, float] = collections.defaultdict(float)
    for body in bodies(jaxpr):
        times = math.prod(eqn.params["length"] for eqn in body.callers if eqn.primitive.name == "scan")
        for eqn in body.eqns:
            if (operations := product_flops(eqn)) and is_floating(eqn.invars[0].aval):
                dtype = dtype_in(eqn, body)
                if dtype.startswith("float8"):
                    less = operations * (1 / gpu.rate("bfloat16") - 1 / gpu.rate(dtype))
                    saved[_pattern(scope_of(eqn, body.scope))] += times * less / PRODUCTS
    spent: dict[str, float] = collections.defaultdict(float)
    kernels: collections.Counter = collections.Counter()
    for launch, times in counted(order_of(program)):
        module = _pattern(module_of(launch.instruction).path)
        if module in saved and _converts(program, launch.instruction):
            bytes_moved = moved(program, launch.computation, launch.instruction)
            spent[module] += times * (bytes_moved / (gpu.bandwidth * COPIES) + LAUNCH)
            kernels[module] += times
    return [Layer(module, saved[module], spent[module], kernels[module]) for module in sorted(saved)]


def _pattern(path: str) -> str:
    return re.sub(r"(?<![^/])\d+(?![^/])", "*", path)


def _converts(program: Program, each: Instruction) -> bool:
    """Returns True for a kernel that casts to float8, or that finds a largest value."""
    if each.opcode not in ("fusion", "convert", "reduce"):
        return False
    if any(dtype.startswith("f8") for dtype, _ in shapes_of(each.type)):
        return True
    called = [program.computations[name] for name in each.called("calls")]
    return any(_finds_largest(program, fused) for fused in called)


def _finds_largest(program: Program, fused: Computation) -> bool:
    """Returns True if a fusion does nothing but reduce to the largest absolute value."""
    reduces = [each for each in fused if each.opcode == "reduce"]
    inside = [program.computations[name] for each in reduces for name in each.called("to_apply")]
    return bool(inside) and all(any(each.opcode == "maximum" for each in one) for one in inside)
