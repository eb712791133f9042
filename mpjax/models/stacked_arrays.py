"""Arrays by path of a stack of blocks, and of its blocks one by one: row 3 of `blocks/all/x` is `blocks/3/x`.

Training, pretrained weights, checkpoints and diagnoses turn one form into the other here, bit for bit.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


ALL = "all"
"""What stands in the path of a stacked array where that of a single block has its number."""

Arrays = dict[str, Any]
Stacks = Mapping[str, int]
"""The number of blocks of each stack, by its path in the model: `{"blocks": 12}`."""


def stack_of(path: str, stacks: Iterable[str]) -> str | None:
    """Returns the stack that the array at `path` belongs to, whose leading axis is of blocks; None if to none."""
    return next((stack for stack in stacks if path.startswith(f"{stack}/{ALL}/")), None)


def names_apart(path: str, stacks: Stacks) -> list[str]:
    """Returns the paths of the rows of an array; its own path alone if it is not stacked."""
    stack = stack_of(path, stacks)
    if stack is None:
        return [path]
    rest = path.removeprefix(f"{stack}/{ALL}/")
    return [f"{stack}/{number}/{rest}" for number in range(stacks[stack])]


def apart(arrays: Mapping[str, Any], stacks: Stacks) -> Arrays:
    """Returns the arrays of single blocks, each a row of a stacked array; other arrays stay as they are."""
    found: Arrays = {}
    for path, array in arrays.items():
        names = names_apart(path, stacks)
        found |= {path: array} if names == [path] else {name: array[row] for row, name in enumerate(names)}
    return found


def replaced(arrays: Mapping[str, Any], given: Mapping[str, Any], stacks: Stacks) -> Arrays:
    """Returns the arrays with `given` ones, by the paths of single blocks, in place of their own or of their rows."""
    found: Arrays = {}
    for path, array in arrays.items():
        names = names_apart(path, stacks)
        if given.keys().isdisjoint(names):
            found[path] = array
        elif names == [path]:
            found[path] = given[path]
        else:
            found[path] = jnp.stack([given[name] if name in given else array[row] for row, name in enumerate(names)])
    return found


def apart_in(tree: Any, stacks: Stacks) -> Any:
    """Returns a pytree, such as a training state, with `apart` of each dict of arrays by path inside it."""

    def is_by_path(node: Any) -> bool:
        return isinstance(node, dict) and any(isinstance(key, str) and stack_of(key, stacks) for key in node)

    return jax.tree.map(lambda node: apart(node, stacks) if is_by_path(node) else node, tree, is_leaf=is_by_path)


def in_form_of(arrays: Mapping[str, Any], wanted: Iterable[str]) -> Arrays:
    """Returns the arrays of a checkpoint with blocks stacked, or one by one, as in the model that is to have them.

    Stacks are found by comparison: a wanted `params/blocks/all/x` is missing while there is `params/blocks/0/x`, or the
    other way round. Then moments, master weights and averages of the same path follow.

    Args:
      arrays: arrays by path, as in `params/blocks/0/x` and `opt_state/inner_state/0/mu/blocks/0/x`.
      wanted: the paths of the parameters and statistics that the model has, as in `params/blocks/all/x`.
    """
    found = dict(arrays)
    missing = [path for path in wanted if path not in arrays]
    for stack in {stack for path in missing if (stack := _counterpart(path, ALL, "0", arrays))}:
        found = _together_in(found, stack)
    for stack in {stack for path in missing if (stack := _counterpart(path, r"\d+", ALL, arrays))}:
        found = _apart_in(found, stack)
    return found


def _counterpart(path: str, of: str, other: str, arrays: Mapping[str, Any]) -> str | None:
    """Returns the stack, without `params/`, in whose place `of` a path has its counterpart with `other` in `arrays`."""
    for match in re.finditer(rf"(?<=/){of}(?=/)", path):
        if path[: match.start()] + other + path[match.end() :] in arrays:
            return path[: match.start()].partition("/")[2].removesuffix("/")
    return None


def _together_in(arrays: Mapping[str, Any], stack: str) -> Arrays:
    found: Arrays = {}
    rows: dict[str, dict[int, Any]] = {}
    for path, array in arrays.items():
        match = re.fullmatch(rf"(.*/{re.escape(stack)})/(\d+)/(.*)", path)
        if match is None:
            found[path] = array
        else:
            rows.setdefault(f"{match[1]}/{ALL}/{match[3]}", {})[int(match[2])] = array
    return found | {path: _stack([parts[number] for number in sorted(parts)]) for path, parts in rows.items()}


def _apart_in(arrays: Mapping[str, Any], stack: str) -> Arrays:
    found: Arrays = {}
    for path, array in arrays.items():
        match = re.fullmatch(rf"(.*/{re.escape(stack)})/{ALL}/(.*)", path)
        if match is None:
            found[path] = array
        else:
            found |= {f"{match[1]}/{row}/{match[2]}": array[row] for row in range(len(array))}
    return found


def _stack(rows: list) -> Any:
    return np.stack(rows) if isinstance(rows[0], np.ndarray) else jnp.stack(rows)
