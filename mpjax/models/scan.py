"""Blocks of one structure as one block with stacked arrays, and one loop: the program does not grow with their number.

The arrays of a stack have a leading axis of blocks, in the training state too: an optimizer, a norm or a check works on
as many arrays as one block has. Their paths have `all` where those of single blocks have a number:
row 3 of `blocks/all/mlp/up/kernel` is `blocks/3/mlp/up/kernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.stacked_arrays import names_apart, stack_of
from mpjax.precision.calls import modules_of
from mpjax.precision.casting.primitives import ARRANGES, CALLS, COMPARES, ELEMENTWISE, FUNCTIONS
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import is_floating
from mpjax.precision.rules import covers, scope_lineage


_CHEAP = (
    (ARRANGES | FUNCTIONS | COMPARES | ELEMENTWISE.keys())
    | {"div", "clamp", "and", "or", "xor", "not", "is_finite", "select_n", "convert_element_type"}
    | {"optimization_barrier", "iota", "pad", "slice"}
)
"""Primitives that read and write each value once: fused with what uses their result, they cost nothing."""


def costly(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Returns True if a loop keeps the result of a primitive: products, kernels, reductions, masks of dropout.

    All else the backward pass computes again from them. XLA does so by fusion where there is no loop; a loop without a
    policy stores every value that the backward pass reads.
    """
    if primitive.name == "lt":  # of dropout: a byte, in place of the random numbers that were compared
        return is_floating(operands[0])
    if primitive.name in CALLS - {"custom_vjp_call"}:
        return any(
            eqn.primitive.name not in _CHEAP for _, eqn in equations(params.get("jaxpr", params.get("call_jaxpr")))
        )
    return primitive.name not in _CHEAP


class Stack(nnx.Module):
    """Blocks as one module, whose call is `x = block(x, *args)` for each of them, in one loop (`jax.lax.scan`).

    Attributes:
      all: the block; each of its arrays has a leading axis of blocks.
      depth: the number of blocks.
      keep: what the loop keeps for the backward pass, as a policy of `jax.checkpoint`; None: the inputs of blocks.
    """

    def __init__(self, blocks: Iterable[nnx.Module]):
        """Stacks the arrays of blocks that are equal in all but their arrays.

        Raises:
          UsageError: blocks differ in structure.
        """
        parts = [nnx.split(block) for block in blocks]
        graph = parts[0][0]
        if different := [number for number, (other, _) in enumerate(parts) if other != graph]:
            raise UsageError(
                f"scan_blocks: block {different[0]} differs from block 0 in structure, and a loop has one body: "
                "write --model.no_scan_blocks"
            )
        self.depth = len(parts)
        self.keep = costly
        self.all = nnx.merge(graph, jax.tree.map(lambda *rows: jnp.stack(rows), *(arrays for _, arrays in parts)))

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        """Applies the blocks in turn.

        Raises:
          UsageError: a block's output has another shape or dtype than its input.
        """
        graph, params, others = nnx.split(self.all, nnx.Param, ...)

        def body(x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            block = nnx.merge(graph, *arrays, copy=True)
            y = block(x, *args)
            if (y.shape, y.dtype) != (x.shape, x.dtype):
                raise UsageError(
                    f"scan_blocks: a block makes {y.dtype}{list(y.shape)} of {x.dtype}{list(x.shape)}, and a loop "
                    "needs the same before and after: write --model.no_scan_blocks"
                )
            return y, nnx.split(block, nnx.Param, ...)[2]

        # In a loop, what is recomputed cannot be merged with what was computed before, as `prevent_cse` is to prevent.
        body = jax.checkpoint(body, policy=self.keep, prevent_cse=False)
        x, changed = jax.lax.scan(body, x, (params, others), length=self.depth)
        nnx.update(self.all, changed)
        return x

    def __iter__(self) -> Iterator[Any]:
        """Yields copies of the blocks one by one; of an abstract stack, abstract ones."""
        graph, arrays = nnx.split(self.all)
        for number in range(self.depth):
            yield nnx.merge(graph, jax.tree.map(functools.partial(_row, number), arrays))


def _row(number: int, array: Any) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
    return array[number]


Blocks = nnx.List | Stack


def in_series(make: Callable[..., nnx.Module], depth: int, *, rngs: nnx.Rngs, scan: bool) -> Blocks:
    """Returns `depth` blocks, each made by `make(rngs=rngs)`: a `Stack` with `scan`, else a list.

    The initial values are the same.
    """
    blocks = [make(rngs=rngs) for _ in range(depth)]
    return Stack(blocks) if scan and depth else nnx.List(blocks)


def through(blocks: Blocks, x: jax.Array, *args: Any) -> jax.Array:
    """Applies `x = block(x, *args)` for each block."""
    if isinstance(blocks, Stack):
        return blocks(x, *args)
    for block in blocks:
        x = block(x, *args)
    return x


def stacks_of(model: nnx.Module) -> Mapping[str, int]:
    """Returns the number of blocks of each stack in a model, by the path of the stack, as in `{"blocks": 12}`."""
    return {path: stack.depth for path, stack in stacks_in(model).items()}


def stacks_in(model: nnx.Module) -> dict[str, Stack]:
    """Returns the stacks of a model by path."""
    return {"/".join(map(str, path)): stack for path, stack in _stacks(model).items()}


def require_alike(model: nnx.Module, patterns: Iterable[str], flag: str) -> None:
    """Checks that rules (see `mpjax.precision.rules.Rules`) say the same of all blocks of a stack.

    Args:
      model: the model, which may be abstract.
      patterns: the patterns of the rules.
      flag: the setting with the rules, for the message.

    Raises:
      UsageError: a pattern matches some blocks and not others.
    """
    for stack, depth in stacks_of(model).items():
        paths = [path for path in modules_of(model) if stack_of(f"{path}/", [stack])]
        for pattern in patterns:
            for path in paths if not pattern.startswith("type:") else ():
                rows = names_apart(f"{path}/", {stack: depth})
                of_stack, *of_rows = (
                    covers(pattern, scope_lineage(name.removesuffix("/"))) for name in (f"{path}/", *rows)
                )
                if len({*of_rows}) > 1 or (all(of_rows) and not of_stack):
                    raise UsageError(
                        f"{flag} '{pattern}' is for some of the {depth} blocks in {stack}, and with scan_blocks they "
                        f"are one loop, for which a rule has to hold as a whole: write '{stack}/*' with the rest of "
                        "the path, for all blocks, or --model.no_scan_blocks"
                    )


def one_by_one(model: Any) -> Any:
    """Returns the model with a list of single blocks in place of each stack; the model itself if it has no stack.

    The result shares no variables with the model, and is for its arrays only: its named scopes are those of the stack.
    """
    if not _stacks(model):
        return model
    copied = nnx.merge(*nnx.split(model))
    for path, stack in _stacks(copied).items():
        owner: Any = copied
        for name in path[:-1]:
            owner = owner[name] if isinstance(name, int) else getattr(owner, name)
        setattr(owner, path[-1], nnx.List(list(stack)))
    return copied


def with_first_blocks(model: Any) -> Any:
    """Returns a copy of the model in which each stack holds the arrays of its first block, for what calls it alone."""
    copied = nnx.merge(*nnx.split(model))
    for stack in _stacks(copied).values():
        stack.all = next(iter(stack))
    return copied


def _stacks(model: nnx.Module) -> dict[tuple, Stack]:
    return {path: module for path, module in nnx.iter_modules(model) if isinstance(module, Stack)}
