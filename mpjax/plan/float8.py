"""Counts the savings and costs of float8 in a compiled step, layer by layer: product time and conversion time.

A product in float8 takes half the time of one in half precision, at the data sheets' rates. But separate kernels have
to find the largest value of an operand and cast it. They move bytes and have to be launched.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpjax.plan.devices import Gpu
from mpjax.plan.hlo import HloProgram, Instruction, module_of, shapes_of
from mpjax.plan.kernels import moved
from mpjax.plan.order import counted, order_of
from mpjax.plan.roofline import COPIES, LAUNCH, PRODUCTS
from mpjax.precision.casting.flops import TENSORFLOAT32, dtype_in, product_flops
from mpjax.precision.casting.jaxprs import scope_of
from mpjax.precision.casting.walk import bodies
from mpjax.precision.dtypes import FLOAT32, is_floating


@dataclasses.dataclass(frozen=True)
class LayerSavings:
    """The savings and costs of float8 in all layers whose paths differ only in indices, in one step on one device.

    Attributes:
      module: the path of the layers with `*` for indices: `blocks/*/mlp/up`.
      saved: seconds that the products save compared with the compute dtype.
      spent: upper bound of the seconds of the kernels that find scales and cast, including the work that XLA fused with
        them.
      kernels: the number of these kernels.
    """

    module: str
    saved: float
    spent: float
    kernels: int


def layers_of(jaxpr: Any, program: HloProgram, gpu: Gpu, compute_dtype: np.dtype) -> list[LayerSavings]:
    """Estimates the seconds that float8 saves and costs in each kind of layer that multiplies in float8.

    Layers whose paths differ only in indices are one kind. The list is in alphabetical order of paths.

    Args:
      jaxpr: the traced step.
      program: the compiled step.
      gpu: the GPU that the step is compiled for.
      compute_dtype: the dtype of the products without float8.
    """
    without = gpu.rate(TENSORFLOAT32 if compute_dtype == FLOAT32 else compute_dtype.name)
    saved: dict[str, float] = collections.defaultdict(float)
    for body in bodies(jaxpr):
        times = math.prod(eqn.params["length"] for eqn in body.callers if eqn.primitive.name == "scan")
        for eqn in body.eqns:
            if (operations := product_flops(eqn)) and is_floating(eqn.invars[0].aval):
                dtype = dtype_in(eqn, body)
                if dtype.startswith("float8"):
                    less = operations * (1 / without - 1 / gpu.rate(dtype))
                    saved[_pattern(scope_of(eqn, body.scope))] += times * less / PRODUCTS
    spent: dict[str, float] = collections.defaultdict(float)
    kernels: collections.Counter = collections.Counter()
    for launch, times in counted(order_of(program)):
        module = _pattern(module_of(launch.instruction).path)
        if module in saved and _converts(program, launch.instruction):
            bytes_moved = moved(program, launch.computation, launch.instruction)
            spent[module] += times * (bytes_moved / (gpu.bandwidth * COPIES) + LAUNCH)
            kernels[module] += times
    return [LayerSavings(module, saved[module], spent[module], kernels[module]) for module in sorted(saved)]


def _pattern(path: str) -> str:
    """Replaces each index in a path by `*`: `blocks/3/mlp` becomes `blocks/*/mlp`."""
    return re.sub(r"(?<![^/])\d+(?![^/])", "*", path)


def _converts(program: HloProgram, instruction: Instruction) -> bool:
    """True for a kernel whose result has a float8 array, or that has reductions, all of which find a maximum."""
    if instruction.opcode not in ("fusion", "convert", "reduce"):
        return False
    if any(dtype.startswith("f8") for dtype, _ in shapes_of(instruction.type)):
        return True
    fused = (program.computations[name] for name in instruction.called("calls"))
    return any(_finds_largest(program, instructions) for instructions in ([instruction], *fused))


def _finds_largest(program: HloProgram, instructions: Iterable[Instruction]) -> bool:
    """True if every reduction among the instructions of a kernel finds a maximum, and there is at least one."""
    reduces = [instruction for instruction in instructions if instruction.opcode == "reduce"]
    inside = [program.computations[name] for reduction in reduces for name in reduction.called("to_apply")]
    return bool(inside) and all(
        any(instruction.opcode == "maximum" for instruction in computation) for computation in inside
    )
