"""Reads the dtypes of each product, convolution and attention of a compiled program, and the library that runs it."""

import dataclasses
import math
import re
from collections.abc import Iterable

from mpjax.plan.hlo import Computation, HloProgram, Instruction, Module, module_named, name_of, shapes_of
from mpjax.precision.casting.flops import ALGORITHMS, TENSORFLOAT32


DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
"""Dtypes by XLA's names; names of float8 and narrower dtypes follow a pattern."""

_LIBRARIES = {
    "__cublas$lt$matmul$f8": ("cuBLASLt float8", "product"),
    "__cublas$lt$matmul$mx": ("cuBLASLt MX", "product"),
    "__cublas$lt": ("cuBLASLt", "product"),
    "__cublas$gemm": ("cuBLAS", "product"),
    "__cudnn$blockScaledDot": ("cuDNN block-scaled", "product"),
    "__cudnn$conv": ("cuDNN", "convolution"),
    "__cudnn$fmha": ("cuDNN", "attention"),
    "__onednn$matmul": ("oneDNN", "product"),
    "__onednn$convolution": ("oneDNN", "convolution"),
}
"""The library and the kind of work by the beginning of a custom call's target, longer ones first."""

BLOCK_SCALED = ("cuBLASLt MX", "cuDNN block-scaled")
"""Libraries that multiply blocks that share a scale."""

_FUSIONS = {"triton": "Triton", "cudnn": "cuDNN", "ynn": "YNNPACK", "onednn": "oneDNN", "cutlass": "CUTLASS"}
"""The library of a fusion by a word of its kind."""

_KINDS = {"dot": "product", "ragged-dot": "product", "scaled-dot": "product", "convolution": "convolution"}
_FUSION_KIND = re.compile(r'"kind":"(__[^"]+)"')
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_BATCHED = re.compile(r'\blhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')
_PRECISION = re.compile(r"\boperand_precision=\{([\w,]+)\}")
_LIBRARY_PRECISION = re.compile(r'"operand_precision":\["(\w+)","(\w+)"')
_ALGORITHM = re.compile(r"\balgorithm=dot_(\w+)")
_PRODUCT = re.compile(r'op_name="[^"]*(?:dot_general|conv_general_dilated)"')


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """A product, convolution or attention of a compiled program, and the dtypes that it runs in.

    Attributes:
      kind: "product", "convolution" or "attention".
      module: the module and the pass, from the name that XLA kept.
      named: False if XLA kept no name; `module` is then empty.
      operands: the dtypes in which the operands are multiplied, in alphabetical order.
      accumulation: the dtype of the sums; empty if the program does not say.
      result: the dtype of the result.
      by: the library or kernel that computes it.
      size: multiplications of a product; 0 for other kinds.
      elements: the elements of the result.
    """

    kind: str
    module: Module
    named: bool
    operands: tuple[str, ...]
    accumulation: str
    result: str
    by: str
    size: int
    elements: int

    @property
    def dtypes(self) -> tuple:
        """The dtypes of the operands, of the sums and of the result."""
        return self.operands, self.accumulation, self.result


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a program was compiled for.

    Attributes:
      name: the device, for messages: "NVIDIA H200", "this CPU".
      platform: "cpu", "gpu" or "tpu".
      tensorfloat32: whether float32 operands lose mantissa bits by default.
    """

    name: str
    platform: str
    tensorfloat32: bool = False


def runs_of(program: HloProgram, target: Target) -> list[CompiledProduct]:
    """Lists the floating products, convolutions and attentions in all computations of a program."""
    callers = _callers(program)
    runs = []
    for computation in program.computations.values():
        if not computation.mentions(*(f" {opcode}(" for opcode in (*_KINDS, "custom-call"))):
            continue
        for instruction in computation:
            if kind := _KINDS.get(instruction.opcode):
                by = _computed_by(instruction, computation, callers, target)
            elif instruction.opcode == "custom-call":
                by, kind = _library(instruction.target)
            else:
                continue
            if kind and (run := _run(instruction, computation, kind, by, callers, target)):
                runs.append(run)
    return runs


def loops_of(program: HloProgram) -> list[CompiledProduct]:
    """Lists the multiplications in loop fusions that XLA wrote in place of small products and convolutions."""
    products = []
    for computation in program.computations.values():
        if not computation.mentions(" multiply("):
            continue
        for instruction in computation:
            if instruction.opcode == "multiply" and _PRODUCT.search(instruction.attributes):
                dtype = dtype_of(instruction.type)
                if dtype:
                    sums = _sum_of(instruction, computation)
                    name = name_of(instruction)
                    kind = "convolution" if name.endswith("conv_general_dilated") else "product"
                    result = sums or dtype
                    products.append(
                        CompiledProduct(kind, module_named(name), True, (dtype, dtype), sums, result, "XLA loop", 0, 0)
                    )
    return products


def dtype_of(type: str) -> str:
    """JAX's name of the floating dtype of the first array in an HLO type; empty if it is not floating.

    >>> dtype_of("(bf16[8,3]{1,0}, u8[0]{0})")
    'bfloat16'
    """
    shapes = shapes_of(type)
    name = shapes[0][0] if shapes else ""
    if name in DTYPES:
        return DTYPES[name]
    return re.sub(r"^f(\d+)(e\w+)$", r"float\1_\2", name) if re.match(r"f\d+e", name) else ""


def _callers(program: HloProgram) -> dict[str, Instruction]:
    """The fusion that calls each computation, by the name of the computation."""
    return {
        called: instruction
        for computation in program.computations.values()
        if computation.mentions(" fusion(", " fusion-start(")
        for instruction in computation
        if instruction.opcode == "fusion"
        for called in instruction.called("calls")
    }


def _computed_by(each: Instruction, computation: Computation, callers: dict[str, Instruction], target: Target) -> str:
    if (fusion := callers.get(computation.name)) is not None:
        if match := _FUSION_KIND.search(fusion.attributes):
            return next((name for word, name in _FUSIONS.items() if word in match[1]), match[1].strip("_"))
        if target.platform == "gpu":
            return "XLA loop"
    return "XLA:CPU" if target.platform == "cpu" else "XLA"


def _library(target: str) -> tuple[str, str]:
    return next((library for start, library in _LIBRARIES.items() if target.startswith(start)), ("", ""))


def _run(
    each: Instruction,
    computation: Computation,
    kind: str,
    by: str,
    callers: dict[str, Instruction],
    target: Target,
) -> CompiledProduct | None:
    inputs = [computation.instructions[name] for name in each.operands if name in computation.instructions]
    first, second = inputs[0].type, inputs[1].type
    operands, result = [dtype_of(first), dtype_of(second)], dtype_of(each.type)
    if not all(operands):
        return None
    if kind != "attention" and (rounded := _rounded_to(each, target)):
        operands = [rounded if dtype == "float32" else dtype for dtype in operands]
    fusion = callers.get(computation.name)
    name = name_of(each) or (name_of(fusion) if fusion else "")
    if name.endswith("/conv_general_dilated"):  # XLA writes convolutions with a window of one pixel as products
        kind = "convolution"
    dims = shapes_of(each.type)[0][1]
    size = _multiplications(each, shapes_of(first)[0][1], shapes_of(second)[0][1], dims) if kind == "product" else 0
    return CompiledProduct(
        kind,
        module_named(name),
        bool(name),
        in_order(operands),
        _accumulation(each, operands, by),
        result,
        by,
        size,
        math.prod(dims),
    )


def in_order(dtypes: Iterable[str]) -> tuple[str, ...]:
    """Sorts the dtypes of operands, because XLA may exchange the operands of a product."""
    return tuple(sorted(dtypes))


def _accumulation(each: Instruction, operands: list[str], by: str) -> str:
    """The dtype of the sums of a product; empty if unknown.

    The libraries add narrower dtypes in float32, unless the program names an algorithm. For XLA's own code, the dtype
    of narrower sums is unknown.
    """
    if algorithm := _ALGORITHM.search(each.attributes):
        return DTYPES[re.findall(r"bf16|f16|f32|f64", algorithm[1])[-1]]
    if "float64" in operands:
        return "float64"
    narrow = not {"float32", TENSORFLOAT32}.intersection(operands)
    return "" if narrow and by.startswith("XLA") else "float32"


def _rounded_to(each: Instruction, target: Target) -> str:
    """The dtype that a library rounds float32 operands to; empty if it keeps their bits."""
    if algorithm := _ALGORITHM.search(each.attributes):
        return ALGORITHMS.get(algorithm[1], "")
    words = _PRECISION.search(each.attributes)
    precisions = words[1].split(",") if words else []
    if not precisions and (library := _LIBRARY_PRECISION.search(each.attributes)):
        precisions = [library[1].lower(), library[2].lower()]
    exact = bool(precisions) and all(word == "highest" for word in precisions)
    return TENSORFLOAT32 if target.tensorfloat32 and not exact else ""


def _multiplications(each: Instruction, left: tuple, right: tuple, result: tuple) -> int:
    contracted = _CONTRACTED.search(each.attributes)
    if contracted:
        return math.prod(result) * math.prod(left[axis] for axis in _numbers(contracted[1]))
    batched = _BATCHED.search(each.attributes)
    batch = math.prod(left[axis] for axis in _numbers(batched[1])) if batched else 1
    return math.isqrt(math.prod(left) * math.prod(right) * math.prod(result) // max(batch, 1))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _sum_of(each: Instruction, computation: Computation) -> str:
    """The dtype of the sum that adds up a multiplication's results; empty if no sum does."""
    for user, _ in computation.users.get(each.name, ()):
        if user.opcode in ("reduce", "reduce-window"):
            return dtype_of(user.type)
        if user.opcode in ("convert", "bitcast", "reshape", "transpose") and (dtype := _sum_of(user, computation)):
            return dtype
    return ""
