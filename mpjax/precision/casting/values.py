"""An array on its way through autocast: its dtype may differ from the one it was traced with."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import is_floating


class Value(NamedTuple):
    """An array and where it came from.

    Attributes:
      array: the array or tracer, or the number of a literal.
      number: what all its elements are, where that is known when the program is traced (see `numbers.py`); it then
        takes the dtype of what it meets.
      peak: it is the largest of several values; the difference from it, as in a softmax, is taken in float32.
      own: the program made it, from keys, integers and numbers alone, and so chose its dtype.
    """

    array: Any
    number: float | None = None
    peak: bool = False
    own: bool = False

    @property
    def fact(self) -> "Value":
        """What is known of it besides the array, for the inside of a call or a loop."""
        return Value(None, self.number, own=self.own)


UNKNOWN = Value(None)


def values_of(arrays: Iterable, facts: Sequence[Value] = ()) -> list[Value]:
    """Arrays as values, nothing known of them unless given."""
    arrays = list(arrays)
    return [fact._replace(array=array) for array, fact in zip(arrays, facts or [UNKNOWN] * len(arrays), strict=True)]


def split_arrays(tree) -> tuple[list[jax.Array], Callable]:
    """The arrays among the leaves of a tree, and the function that puts others of their shapes in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def with_arrays(arrays):
        filled = list(leaves)
        for position, array in zip(positions, arrays, strict=True):
            filled[position] = array
        return jax.tree.unflatten(treedef, filled)

    return [jnp.asarray(leaves[position]) for position in positions], with_arrays


def is_array(leaf) -> bool:
    """Whether a leaf of a tree is an array that JAX can trace."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"  # objects, texts and times are none of JAX's
    return isinstance(leaf, jax.Array)


def arrays_of(values: Iterable[Value]) -> list[jax.Array]:
    """The arrays of values."""
    return [jnp.asarray(value.array) for value in values]


def cast(array, dtype):
    """A floating array (or the number of a literal) in `dtype`; all others, and all if it is None, as they are."""
    if dtype is None or not (is_floating(array) or isinstance(array, float)):
        return array
    return array if getattr(array, "dtype", None) == dtype else jnp.asarray(array).astype(dtype)


def cast_like(arrays: Iterable, avals: Iterable) -> list:
    """Floating arrays in the dtypes of `avals` (what they were traced with, or what they must agree on)."""
    return [cast(array, aval.dtype) for array, aval in zip(arrays, avals, strict=True)]


def avals_of(atoms: Iterable) -> list:
    """What the variables and literals of an equation were traced with."""
    return [atom.aval for atom in atoms]
