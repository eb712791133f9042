"""Counts the bytes that each kernel reads and writes, that a collective exchanges, and that a step's update moves.

The bytes are an upper bound. Each kernel is assumed to read its operands from memory and to write its result there,
even if the previous kernel left them in a cache.
"""

from collections.abc import Iterator, Sequence

from mpjax.plan.hlo import Computation, HloProgram, Instruction, bytes_of, name_of, shapes_of


FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
"""Opcodes of instructions that launch no kernel and move no bytes."""

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_IN_PART = {"dynamic-slice", "gather", "slice"}
"""Operations that read only as many bytes of their first operand as their result has."""
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that update their first operand in place, and the index of the operand that holds the update."""


def moved(program: HloProgram, computation: Computation, instruction: Instruction) -> int:
    """Counts the bytes that a kernel, an instruction of `computation`, reads and writes in one execution.

    A slice or a gather reads only as many bytes as it returns. An in-place update counts as the update, read and
    written. The workspace of a library call does not count.
    """
    sizes = computation.operand_bytes(instruction)
    if instruction.opcode == "fusion":
        (called,) = instruction.called("calls")
        fused = program.computations[called]
        return sum(_read(fused, number, size) for number, size in enumerate(sizes)) + _written(fused, fused.root)
    if instruction.opcode in _IN_PART:
        return 2 * instruction.bytes + sum(sizes[1:])
    if instruction.opcode in _IN_PLACE:
        return 2 * sizes[_IN_PLACE[instruction.opcode]]
    if _holds_operands(instruction):
        return instruction.bytes
    return sum(sizes) + instruction.bytes - _scratch(instruction)


def _read(fused: Computation, number: int, size: int) -> int:
    """Counts the bytes that a fusion reads of operand `number`, at most `size`, the bytes of the whole operand.

    It is less than `size` only if every use slices the operand or updates a slice of it.
    """
    if number not in fused.parameters:
        return size
    total = 0
    for user, index in _uses(fused, fused.parameters[number]):
        if index == 0 and user.opcode in _IN_PART:
            total += user.bytes
        elif index == 0 and user.opcode in _IN_PLACE:
            # A scatter reads the old values to add to them. A slice update overwrites them.
            total += fused.operand_bytes(user)[2] if user.opcode == "scatter" else 0
        else:
            return size
    return min(size, total)


def _uses(fused: Computation, value: Instruction) -> list[tuple[Instruction, int]]:
    """Lists the instructions that use a value, directly or by bitcasts, each with the index of that operand."""
    uses = []
    for user, index in fused.users.get(value.name, []):
        uses += _uses(fused, user) if user.opcode == "bitcast" else [(user, index)]
    return uses


def _written(fused: Computation, root: Instruction) -> int:
    """Counts the bytes that a fusion with this root instruction writes. An in-place update counts only the update."""
    if root.opcode == "tuple":
        return sum(_written(fused, fused.instructions[name]) for name in root.operands)
    if root.opcode == "bitcast" and root.operands[0] in fused.instructions:
        return min(root.bytes, _written(fused, fused.instructions[root.operands[0]]))
    if root.opcode in _IN_PLACE:
        return fused.operand_bytes(root)[_IN_PLACE[root.opcode]]
    return root.bytes


def _scratch(instruction: Instruction) -> int:
    """The bytes of the workspace of a call of cuBLAS or cuDNN: its last output, if it is u8 or s8 and not the only one.

    For any other instruction it is 0.
    """
    if not instruction.target.startswith("__cu"):
        return 0
    shapes = shapes_of(instruction.type)
    dtype, sizes = shapes[-1]
    return bytes_of(f"{dtype}[{','.join(map(str, sizes))}]") if len(shapes) > 1 and dtype in ("u8", "s8") else 0


def only_copies(program: HloProgram, instruction: Instruction) -> bool:
    """True for a copy or a transpose, and for a fusion whose operations, without those in `FREE`, are all of these."""
    if instruction.opcode != "fusion":
        return instruction.opcode in ("copy", "copy-start", "transpose")
    (called,) = instruction.called("calls")
    work = {inside.opcode for inside in program.computations[called]} - FREE
    return bool(work) and work <= {"copy", "transpose"}


def payload(computation: Computation, instruction: Instruction) -> list[tuple[str, int]]:
    """Lists the dtype (XLA's name) and the bytes of each whole array that a collective exchanges.

    The whole array is the result of an all-gather, and the operand of a reduce-scatter: the larger of the two.
    """
    sizes = computation.operand_bytes(instruction)
    operand_bytes = sum(sizes)
    result = instruction.bytes - operand_bytes if _holds_operands(instruction) else instruction.bytes
    grown = max(operand_bytes, result) / operand_bytes if operand_bytes else 1
    dtypes = [shapes_of(computation.instructions[name].type)[0][0] for name in instruction.operands]
    return [(dtype, round(size * grown)) for dtype, size in zip(dtypes, sizes, strict=True)]


def _holds_operands(instruction: Instruction) -> bool:
    """True if the type of an instruction holds both operands and results, as for a `-start`.

    Before jaxlib 0.12, the type of an `all-reduce-start` held results alone; since then, it is a pair of tuples.
    """
    return instruction.opcode.endswith("-start") and (
        instruction.opcode != "all-reduce-start" or instruction.type.startswith("((")
    )


_ENDS = ("parameter", "constant", "while", "conditional")


def update_bytes(program: HloProgram, outputs: Sequence[int]) -> int:
    """Counts the bytes that kernels read and write to compute outputs of a program, such as new parameters.

    It counts each kernel between the gradients and the outputs once: neither kernels of the differentiated function,
    nor collectives, nor anything before them. In a loop over steps, one step counts.

    Args:
      program: the compiled program.
      outputs: the indices of the outputs.
    """
    entry = program.computations[program.entry]
    starts = [_source(program, entry, entry.root, number) for number in outputs]
    kernels: dict[tuple[str, str], tuple[Computation, Instruction]] = {}
    for computation, start in starts:
        for kernel in _before(computation, start, kernels):
            kernels[computation.name, kernel.name] = computation, kernel
    return sum(moved(program, computation, kernel) for computation, kernel in kernels.values())


def _source(
    program: HloProgram, computation: Computation, instruction: Instruction, index: int
) -> tuple[Computation, Instruction]:
    """Finds the instruction that computes element `index` of a value, and the computation that contains it.

    It follows tuples, and enters the bodies of loops and calls.
    """
    while True:
        match instruction.opcode:
            case "tuple":
                instruction, index = computation.instructions[instruction.operands[index]], 0
            case "get-tuple-element":
                index = int(instruction.attributes.partition("index=")[2].partition(",")[0])
                instruction = computation.instructions[instruction.operands[0]]
            case "while" | "call":
                computation = program.computations[instruction.called("body", "to_apply")[0]]
                instruction = computation.root
            case _:
                return computation, instruction


def _before(computation: Computation, instruction: Instruction, known: dict) -> Iterator[Instruction]:
    """Yields `instruction`, if it is a kernel, and the kernels in its computation that its value depends on.

    The search ends at arguments, loops, collectives, the differentiated function, and kernels in `known`, which are
    named by computation and instruction.
    """
    waiting, visited = [instruction], set()
    while waiting:
        instruction = waiting.pop()
        if instruction.name in visited or instruction.opcode in _ENDS or _is_given(instruction):
            continue
        visited.add(instruction.name)
        if instruction.opcode not in FREE and not instruction.opcode.endswith("-done"):
            if (computation.name, instruction.name) in known:
                continue
            yield instruction
        waiting += [computation.instructions[name] for name in instruction.operands if name in computation.instructions]


def _is_given(instruction: Instruction) -> bool:
    """True for an instruction of the differentiated function, and for a collective."""
    return (
        "jvp(" in name_of(instruction) or instruction.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES
    )
