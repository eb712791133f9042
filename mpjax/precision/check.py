"""Checks that the arrays of a tree have the dtype they were promised to have."""

import jax
from jax.typing import DTypeLike

from mpjax.errors import DtypeError
from mpjax.precision.dtypes import as_dtype, is_floating


def path_name(path: tuple) -> str:
    """A pytree key path with `/` between its parts, as module paths are written."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_dtypes(tree, dtype: DTypeLike, *, name: str = "tree") -> None:
    """Raises when a floating leaf of `tree` has another dtype than wanted.

    Args:
      tree: any pytree of arrays or abstract arrays; integers, booleans and keys are not looked at.
      dtype: what every floating leaf should have, a name or a dtype.
      name: what to call the tree in the message.

    Raises:
      DtypeError: names every offending leaf by path, with what it has and what was wanted.
    """
    wanted = as_dtype(dtype)
    offenders = [
        f"  {path_name(path) or '(the value itself)'}: {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_floating(leaf) and leaf.dtype != wanted
    ]
    if offenders:
        raise DtypeError(
            f"{name}: {len(offenders)} leaves are not {wanted}:\n" + "\n".join(offenders) + f"\nwanted: {wanted}"
        )


def check_same_dtypes(one, other, *, names: tuple[str, str]) -> None:
    """Raises when a leaf of one tree has another dtype than that of the other; Python numbers have none.

    Args:
      one: any pytree.
      other: a pytree of the same structure.
      names: what to call them in the message.

    Raises:
      DtypeError: names every such leaf by path.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=False)
    offenders = [
        f"  {path_name(path) or '(the value itself)'}: {names[0]} {a.dtype}, {names[1]} {b.dtype}"
        for (path, a), b in pairs
        if hasattr(a, "dtype") and hasattr(b, "dtype") and a.dtype != b.dtype
    ]
    if offenders:
        raise DtypeError(f"{len(offenders)} leaves differ in dtype; cast one of the two:\n" + "\n".join(offenders))
