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
    """A product, convolution or attention of a compiled program, and the dtypes that it is computed in.

    Attributes:
      kind: "product", "convolution" or "attention".
      module: the module and the pass, from the name that XLA kept.
      named: False if XLA kept no name; `module` is then empty.
      operands: the dtypes in which the operands are multiplied, in alphabetical order.
      accumulation: the dtype of the sums; empty if the program does not say.
      result: the dtype of the result.
      by: the library or kernel that computes it.
      size: the number of scalar multiplications of a matrix product; 0 for other kinds.
      elements: the number of elements of the result.
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
        """The tuple (dtypes of the operands, dtype of the sums, dtype of the result)."""
        return self.operands, self.accumulation, self.result


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a program was compiled for.

    Attributes:
      name: the device, for messages: "NVIDIA H200", "this CPU".
      platform: "cpu", "gpu" or "tpu".
      tensorfloat32: whether products round float32 operands to tensorfloat32 by default.
    """

    name: str
    platform: str
    tensorfloat32: bool = False


def compiled_products_of(program: HloProgram, target: Target) -> list[CompiledProduct]:
    """Lists the floating products, convolutions and attentions in all computations of a program, once for each.

    Integer products, and calls of unknown libraries, are left out.
    """
    callers = _callers(program)
    products = []
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
            if kind and (product := _compiled_product(instruction, computation, kind, by, callers, target)):
                products.append(product)
    return products


def loops_of(program: HloProgram) -> list[CompiledProduct]:
    """Lists the floating multiplications that XLA wrote in place of small matrix products and convolutions.

    Each has `by` "XLA loop", and 0 for `size` and `elements`.
    """
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
    """Maps the name of each computation that a fusion calls to the fusion instruction."""
    return {
        called: instruction
        for computation in program.computations.values()
        if computation.mentions(" fusion(", " fusion-start(")
        for instruction in computation
        if instruction.opcode == "fusion"
        for called in instruction.called("calls")
    }


def _computed_by(
    instruction: Instruction, computation: Computation, callers: dict[str, Instruction], target: Target
) -> str:
    """Names the code that computes a product: a library of `_FUSIONS`, XLA's loop on a GPU, or XLA itself."""
    if (fusion := callers.get(computation.name)) is not None:
        if match := _FUSION_KIND.search(fusion.attributes):
            return next((name for word, name in _FUSIONS.items() if word in match[1]), match[1].strip("_"))
        if target.platform == "gpu":
            return "XLA loop"
    return "XLA:CPU" if target.platform == "cpu" else "XLA"


def _library(target: str) -> tuple[str, str]:
    """The library and the kind of work of a custom call's target; two empty strings if it is not in `_LIBRARIES`."""
    return next((library for start, library in _LIBRARIES.items() if target.startswith(start)), ("", ""))


def _compiled_product(
    instruction: Instruction,
    computation: Computation,
    kind: str,
    by: str,
    callers: dict[str, Instruction],
    target: Target,
) -> CompiledProduct | None:
    """Describes a product of a computation; None if an operand is not floating."""
    inputs = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    first, second = inputs[0].type, inputs[1].type
    operands, result = [dtype_of(first), dtype_of(second)], dtype_of(instruction.type)
    if not all(operands):
        return None
    if kind != "attention" and (rounded := _rounded_to(instruction, target)):
        operands = [rounded if dtype == "float32" else dtype for dtype in operands]
    fusion = callers.get(computation.name)
    name = name_of(instruction) or (name_of(fusion) if fusion else "")
    if name.endswith("/conv_general_dilated"):  # XLA writes convolutions with a window of one pixel as products
        kind = "convolution"
    dims = shapes_of(instruction.type)[0][1]
    size = (
        _multiplications(instruction, shapes_of(first)[0][1], shapes_of(second)[0][1], dims) if kind == "product" else 0
    )
    return CompiledProduct(
        kind,
        module_named(name),
        bool(name),
        in_order(operands),
        _accumulation(instruction, operands, by),
        result,
        by,
        size,
        math.prod(dims),
    )


def in_order(dtypes: Iterable[str]) -> tuple[str, ...]:
    """Sorts the dtypes of operands by name, because XLA may exchange the operands of a product."""
    return tuple(sorted(dtypes))


def _accumulation(instruction: Instruction, operands: list[str], by: str) -> str:
    """The dtype in which a product with these operands adds up; empty if unknown.

    It is the dtype of the algorithm that the program names, if any; else float64 or float32 for operands of these, and
    float32 for narrower operands in a library. For narrower operands in XLA's own code it is unknown.
    """
    if algorithm := _ALGORITHM.search(instruction.attributes):
        return DTYPES[re.findall(r"bf16|f16|f32|f64", algorithm[1])[-1]]
    if "float64" in operands:
        return "float64"
    narrow = not {"float32", TENSORFLOAT32}.intersection(operands)
    return "" if narrow and by.startswith("XLA") else "float32"


def _rounded_to(instruction: Instruction, target: Target) -> str:
    """The dtype that a product rounds float32 operands to, by its algorithm or precision; empty if it does not."""
    if algorithm := _ALGORITHM.search(instruction.attributes):
        return ALGORITHMS.get(algorithm[1], "")
    words = _PRECISION.search(instruction.attributes)
    precisions = words[1].split(",") if words else []
    if not precisions and (library := _LIBRARY_PRECISION.search(instruction.attributes)):
        precisions = [library[1].lower(), library[2].lower()]
    exact = bool(precisions) and all(word == "highest" for word in precisions)
    return TENSORFLOAT32 if target.tensorfloat32 and not exact else ""


def _multiplications(instruction: Instruction, left: tuple, right: tuple, result: tuple) -> int:
    """Counts the scalar multiplications of a matrix product from the dimensions of its operands and its result."""
    contracted = _CONTRACTED.search(instruction.attributes)
    if contracted:
        return math.prod(result) * math.prod(left[axis] for axis in _numbers(contracted[1]))
    batched = _BATCHED.search(instruction.attributes)
    batch = math.prod(left[axis] for axis in _numbers(batched[1])) if batched else 1
    return math.isqrt(math.prod(left) * math.prod(right) * math.prod(result) // max(batch, 1))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _sum_of(instruction: Instruction, computation: Computation) -> str:
    """The dtype of the reduction that adds up the results of a multiplication; empty if there is none."""
    for user, _ in computation.users.get(instruction.name, ()):
        if user.opcode in ("reduce", "reduce-window"):
            return dtype_of(user.type)
        if user.opcode in ("convert", "bitcast", "reshape", "transpose") and (dtype := _sum_of(user, computation)):
            return dtype
    return ""
