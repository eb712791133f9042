"""Runs blocks of one structure as one loop over stacked arrays, so that the program does not grow with their number.

The arrays of a stack have a leading axis of blocks, in the training state too. An optimizer, a norm or a check works on
as many arrays as a single block has. The paths of stacked arrays have `all` in place of the number of a block: row 3 of
`blocks/all/mlp/up/kernel` is `blocks/3/mlp/up/kernel`. Training, pretrained weights, checkpoints and diagnoses convert
between the two forms with this module, bit for bit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision.calls import modules_of
from mpjax.precision.casting.primitives import ARRANGES, CALLS, COMPARES, ELEMENTWISE, FUNCTIONS
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import is_floating
from mpjax.precision.rules import covers, is_typed, scope_lineage


_CHEAP = (
    (ARRANGES | FUNCTIONS | COMPARES | ELEMENTWISE.keys())
    | {"div", "clamp", "and", "or", "xor", "not", "is_finite", "select_n", "convert_element_type"}
    | {"optimization_barrier", "iota", "pad", "slice", "split", "concatenate"}
)
"""Primitives that read and write each value once. Fused with the consumers of their result, they cost nothing."""


def costly(primitive: Any, *operands: Any, **params: Any) -> bool:
    """True if a loop keeps a primitive's result for the backward pass: products, kernels, reductions, dropout masks.

    It is a policy of `jax.checkpoint`. The backward pass recomputes all other values (`_CHEAP`) from these. Without a
    loop, XLA recomputes them by fusion. A loop without a policy stores every value that the backward pass reads.
    Parameters that are gathered from several devices are gathered again: kept, all blocks' would be in memory at once.
    """
    if primitive.name == "lt":  # the mask of dropout: a byte, in place of the random numbers that it compares
        return is_floating(operands[0])
    names = run_by(primitive, params)
    if "all_gather" in names:
        return False
    return primitive.name == "custom_vjp_call" or not names <= _CHEAP


def run_by(primitive: Any, params: Mapping[str, Any]) -> set[str]:
    """The names of the primitives that an equation runs: those inside, at any depth, if it is a call, or its own."""
    if primitive.name in CALLS | {"shard_map"}:
        return {eqn.primitive.name for _, eqn in equations(params.get("jaxpr", params.get("call_jaxpr")))}
    return {primitive.name}


class Stack(nnx.Module):
    """Blocks as one module, which computes `x = block(x, *args)` for each block in one loop (`jax.lax.scan`).

    Attributes:
      all: the block; each of its arrays has a leading axis of blocks.
      depth: the number of blocks.
      keep: the values that the loop keeps for the backward pass, as a policy of `jax.checkpoint`, by default `costly`;
        None keeps only the inputs of blocks.
    """

    def __init__(self, blocks: Iterable[nnx.Module]):
        """Copies the blocks into one whose arrays are stacked; at least one block.

        Raises:
          UsageError: blocks differ in more than the values of their arrays.
        """
        splits = [nnx.split(block) for block in blocks]
        graph = splits[0][0]
        if different := [number for number, (other, _) in enumerate(splits) if other != graph]:
            raise UsageError(
                f"scan_blocks: block {different[0]} differs from block 0 in structure, and a loop has one body: "
                "write --model.no_scan_blocks"
            )
        self.depth = len(splits)
        self.keep = costly
        self.all = nnx.merge(graph, jax.tree.map(lambda *rows: jnp.stack(rows), *(arrays for _, arrays in splits)))

    def __call__(self, x: Any, *args: Any, options: Sequence[tuple] = ((),), chosen: Sequence[int] = ()) -> Any:
        """Applies the blocks in turn, as `through` does, and updates their statistics and random streams in place.

        Raises:
          UsageError: a block's output has another shape or dtype than its input.
        """
        graph, params, others = nnx.split(self.all, nnx.Param, ...)
        # Blocks without a choice know their arguments at trace time.
        several = len(options) > 1
        table = jax.tree.map(lambda *rows: jnp.stack([jnp.asarray(row) for row in rows]), *options) if several else ()
        numbers = jnp.asarray(chosen, jnp.int32) if several else None

        def body(x: Any, row: Any) -> tuple[Any, Any]:
            arrays, number = row
            block = nnx.merge(graph, *arrays, copy=True)
            option = options[0] if number is None else jax.tree.map(lambda values: values[number], table)
            y = block(x, *args, *option)
            if (after := _described(y)) != (before := _described(x)):
                raise UsageError(
                    f"scan_blocks: a block makes {after} of {before}, and a loop needs the same before and after: "
                    "write --model.no_scan_blocks"
                )
            return y, nnx.split(block, nnx.Param, ...)[2]

        # `prevent_cse` keeps XLA from merging recomputed values with the originals, which cannot happen in a loop.
        body = jax.checkpoint(body, policy=self.keep, prevent_cse=False)
        x, changed = jax.lax.scan(body, x, ((params, others), numbers), length=self.depth)
        nnx.update(self.all, changed)
        return x

    def __iter__(self) -> Iterator[Any]:
        """Yields copies of the single blocks, first to last; a change of a copy does not change the stack.

        An abstract stack yields abstract blocks.
        """
        graph, arrays = nnx.split(self.all)
        for number in range(self.depth):
            yield nnx.merge(graph, jax.tree.map(functools.partial(_row, number), arrays))


def _described(arrays: Any) -> str:
    """The dtypes and shapes of one array or of several in a tuple, as in `float32[2, 3]`."""
    return ", ".join(f"{array.dtype}{list(array.shape)}" for array in jax.tree.leaves(arrays))


def _row(number: int, array: Any) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
    return array[number]


Blocks = nnx.List | Stack


def in_series(make: Callable[..., nnx.Module], depth: int, *, rngs: nnx.Rngs, scan: bool) -> Blocks:
    """Makes `depth` blocks by calls of `make(rngs=rngs)`, as a `Stack` if `scan` is true, else as an `nnx.List`.

    The initial values are the same in both forms. A depth of 0 always makes an empty list.
    """
    blocks = [make(rngs=rngs) for _ in range(depth)]
    return Stack(blocks) if scan and depth else nnx.List(blocks)


def through(blocks: Blocks, x: Any, *args: Any, options: Sequence[tuple] = ((),), chosen: Sequence[int] = ()) -> Any:
    """Computes `x = block(x, *args, *option)` for each block in turn; returns the last x (without blocks, x itself).

    Args:
      blocks: the blocks.
      x: the input of the first block, an array or a tuple of arrays.
      *args: arguments that all blocks get.
      options: alternative tuples of further arguments, of equal structure and shapes. With several of them, a `Stack`
        passes their numbers as traced arrays; otherwise they are passed as they are.
      chosen: for each block, the index in `options` of its further arguments; empty: all blocks get the first tuple.

    Raises:
      UsageError: in a `Stack`, a block's output has another shape or dtype than its input.
    """
    if isinstance(blocks, Stack):
        return blocks(x, *args, options=options, chosen=chosen)
    for number, block in enumerate(blocks):
        x = block(x, *args, *options[chosen[number] if chosen else 0])
    return x


def stacks_of(model: nnx.Module) -> Mapping[str, int]:
    """The number of blocks of each stack in a model, by the path of the stack, as in `{"blocks": 12}`."""
    return {path: stack.depth for path, stack in stacks_in(model).items()}


def stacks_in(model: nnx.Module) -> dict[str, Stack]:
    """The stacks of a model by their path, as in `{"blocks": Stack(...)}`."""
    return {"/".join(map(str, path)): stack for path, stack in _stacks(model).items()}


def stacks_by_block(model: nnx.Module) -> dict[str, Stack]:
    """The stacks of a model by the path of their stacked block, as in `{"blocks/all": Stack(...)}`."""
    return {f"{path}/{ALL}": stack for path, stack in stacks_in(model).items()}


def require_alike(model: nnx.Module, patterns: Iterable[str], flag: str) -> None:
    """Checks that rules (see `mpjax.precision.rules.Rules`) treat all blocks of each stack alike.

    Patterns that begin with `type:` always do, and are not checked.

    Args:
      model: the model, which may be abstract.
      patterns: the patterns of the rules.
      flag: the setting with the rules, for the message.

    Raises:
      UsageError: a pattern matches some blocks and not others, or all blocks but not their stack.
    """
    for stack, depth in stacks_of(model).items():
        paths = [path for path in modules_of(model) if stack_of(f"{path}/", [stack])]
        for pattern in patterns:
            for path in paths if not is_typed(pattern) else ():
                block_paths = names_apart(f"{path}/", {stack: depth})
                of_stack, *of_blocks = (
                    covers(pattern, scope_lineage(name.removesuffix("/"))) for name in (f"{path}/", *block_paths)
                )
                if len({*of_blocks}) > 1 or (all(of_blocks) and not of_stack):
                    raise UsageError(
                        f"{flag} '{pattern}' is for some of the {depth} blocks in {stack}, and with scan_blocks they "
                        f"are one loop, for which a rule has to hold as a whole: write '{stack}/*' with the rest of "
                        "the path, for all blocks, or --model.no_scan_blocks"
                    )


def one_by_one(model: Any) -> Any:
    """Copies a model, with an `nnx.List` of single blocks in place of each stack; without stacks, returns it itself.

    Use the copy only for its arrays: it shares no variables with the model, and has the named scopes of the stack.
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


def _stacks(model: nnx.Module) -> dict[tuple, Stack]:
    return {path: module for path, module in nnx.iter_modules(model) if isinstance(module, Stack)}


ALL = "all"
"""The part of a stacked array's path in place of the number of a block."""

Arrays = dict[str, Any]
Stacks = Mapping[str, int]
"""The number of blocks of each stack, by its path in the model: `{"blocks": 12}`."""


def stack_of(path: str, stacks: Iterable[str]) -> str | None:
    """Finds the one of `stacks`, paths such as `blocks`, whose block holds the array at `path`, as in `blocks/all/x`.

    None if the array is in no stack.
    """
    return next((stack for stack in stacks if path.startswith(f"{stack}/{ALL}/")), None)


def names_apart(path: str, stacks: Stacks) -> list[str]:
    """Lists the paths of an array's slices for single blocks: `blocks/0/x`, `blocks/1/x`, ... for `blocks/all/x`.

    For an array that is in no stack, the list is `[path]`.
    """
    stack = stack_of(path, stacks)
    if stack is None:
        return [path]
    rest = path.removeprefix(f"{stack}/{ALL}/")
    return [f"{stack}/{number}/{rest}" for number in range(stacks[stack])]


def apart(arrays: Mapping[str, Any], stacks: Stacks) -> Arrays:
    """Splits each stacked array, `blocks/all/x`, along its leading axis into the arrays `blocks/0/x`, `blocks/1/x`, ...

    The other arrays are returned under the same paths, not copied. A path may have None, as a float32 parameter that
    needs no master has; so have its slices.
    """
    singles: Arrays = {}
    for path, array in arrays.items():
        names = names_apart(path, stacks)
        if names == [path] or array is None:
            singles |= dict.fromkeys(names, array)
        else:
            singles |= {name: array[row] for row, name in enumerate(names)}
    return singles


def replaced(arrays: Mapping[str, Any], replacements: Mapping[str, Any], stacks: Stacks) -> Arrays:
    """Copies the dict `arrays`, with some arrays, or slices of stacked arrays, replaced by the `replacements` ones.

    Given arrays of paths that `arrays` does not have are ignored.

    Args:
      arrays: arrays by path, with stacked blocks.
      replacements: the new arrays, by the paths of single blocks (`blocks/3/x`).
      stacks: the number of blocks of each stack.
    """
    updated: Arrays = {}
    for path, array in arrays.items():
        names = names_apart(path, stacks)
        if replacements.keys().isdisjoint(names):
            updated[path] = array
        elif names == [path]:
            updated[path] = replacements[path]
        else:
            updated[path] = jnp.stack(
                [replacements[name] if name in replacements else array[row] for row, name in enumerate(names)]
            )
    return updated


def apart_in(tree: Any, stacks: Stacks) -> Any:
    """Applies `apart` to each dict of arrays by path in a pytree, such as a training state: splits stacked arrays."""

    def is_by_path(node: Any) -> bool:
        return isinstance(node, dict) and any(isinstance(key, str) and stack_of(key, stacks) for key in node)

    return jax.tree.map(lambda node: apart(node, stacks) if is_by_path(node) else node, tree, is_leaf=is_by_path)


def in_form_of(arrays: Mapping[str, Any], wanted: Iterable[str]) -> Arrays:
    """Stacks or splits the blocks in the arrays of a checkpoint, to match the model that loads them, in a new dict.

    Stacks are found by comparison: a wanted `params/blocks/all/x` is missing while there is `params/blocks/0/x`, or the
    other way round. Moments, master weights and averages of the same path follow. All other arrays, and wanted paths
    that are missing in both forms, are left as they are.

    Args:
      arrays: arrays by path, as in `params/blocks/0/x` and `opt_state/inner_state/0/mu/blocks/0/x`.
      wanted: the paths of the model's parameters and statistics, as in `params/blocks/all/x`.
    """
    converted = dict(arrays)
    missing = [path for path in wanted if path not in arrays]
    for stack in {stack for path in missing if (stack := _counterpart(path, ALL, "0", arrays))}:
        converted = _together_in(converted, stack)
    for stack in {stack for path in missing if (stack := _counterpart(path, r"\d+", ALL, arrays))}:
        converted = _apart_in(converted, stack)
    return converted


def _counterpart(path: str, of: str, other: str, arrays: Mapping[str, Any]) -> str | None:
    """Finds the stack that `path` belongs to and whose blocks `arrays` has in the other form, stacked or single.

    None if there is none.

    Args:
      path: a path that `arrays` lacks, as in `params/blocks/all/x`.
      of: a regular expression for the part of the path that names the block: `all` or a number.
      other: this part in the other form: `0` for `params/blocks/0/x`, or `all`.
      arrays: arrays by path.

    Returns:
      The path of the stack without its first part, `params/`, as in `blocks`.
    """
    for match in re.finditer(rf"(?<=/){of}(?=/)", path):
        if path[: match.start()] + other + path[match.end() :] in arrays:
            return path[: match.start()].partition("/")[2].removesuffix("/")
    return None


def _together_in(arrays: Mapping[str, Any], stack: str) -> Arrays:
    unchanged: Arrays = {}
    blocks_by_path: dict[str, dict[int, Any]] = {}
    for path, array in arrays.items():
        match = re.fullmatch(rf"(.*/{re.escape(stack)})/(\d+)/(.*)", path)
        if match is None:
            unchanged[path] = array
        else:
            blocks_by_path.setdefault(f"{match[1]}/{ALL}/{match[3]}", {})[int(match[2])] = array
    return unchanged | {
        path: _stack([blocks[number] for number in sorted(blocks)]) for path, blocks in blocks_by_path.items()
    }


def _apart_in(arrays: Mapping[str, Any], stack: str) -> Arrays:
    singles: Arrays = {}
    for path, array in arrays.items():
        match = re.fullmatch(rf"(.*/{re.escape(stack)})/{ALL}/(.*)", path)
        if match is None:
            singles[path] = array
        else:
            singles |= {f"{match[1]}/{row}/{match[2]}": array[row] for row in range(len(array))}
    return singles


def _stack(arrays: list) -> Any:
    return np.stack(arrays) if isinstance(arrays[0], np.ndarray) else jnp.stack(arrays)
