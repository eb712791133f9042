"""What autocast knows about each array. The dtype of an array may differ from the one that it was traced with."""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import is_floating


class Origin(enum.IntEnum):
    """What an array depends on. The origin of a result is the largest of its operands'; see `origins.py`.

    Attributes:
      NUMBERS: nothing but numbers of the program, and random keys.
      PARAMETERS: parameters, and nothing of the batch.
      UNKNOWN: it is not known.
      BATCH: something besides parameters.
    """

    NUMBERS = 0
    PARAMETERS = 1
    UNKNOWN = 2
    BATCH = 3


class Value(NamedTuple):
    """An array and what is known about its origin.

    Attributes:
      array: the array or tracer, or the number of a literal.
      number: the value of all its elements, if it is known at trace time (see `numbers.py`). The array then takes the
        dtype of the other operands.
      peak: True for the largest of several values. Differences from it, as in a softmax, are computed in float32.
      own: True if the program made it only from keys, integers and numbers, and so chose its dtype.
      constant: True if the program made it only from these and from arrays that it closed over, without a product.
      origin: what it depends on.
    """

    array: Any
    number: float | None = None
    peak: bool = False
    own: bool = False
    constant: bool = False
    origin: Origin = Origin.UNKNOWN

    @property
    def fact(self) -> "Value":
        """Returns the value without its array, to use inside a call or a loop."""
        return Value(None, self.number, own=self.own, constant=self.constant, origin=self.origin)


UNKNOWN = Value(None)


def values_of(arrays: Iterable, facts: Sequence[Value] = ()) -> list[Value]:
    """Returns arrays as values, with `facts` about them if given."""
    arrays = list(arrays)
    return [fact._replace(array=array) for array, fact in zip(arrays, facts or [UNKNOWN] * len(arrays), strict=True)]


def joined(values: Iterable[Value]) -> Origin:
    """Returns the origin of what is computed from values."""
    return max((value.origin for value in values), default=Origin.NUMBERS)


def computed_from(inputs: Iterable[Value], arrays: Iterable) -> list[Value]:
    """Returns the results of a call or loop as values, of which no more is known than what they were computed from."""
    origin = joined(inputs)
    return [Value(array, origin=origin) for array in arrays]


def split_arrays(tree) -> tuple[list[jax.Array], Callable]:
    """Returns the arrays of a tree, and a function that puts other arrays of the same shapes in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def with_arrays(arrays):
        filled = list(leaves)
        for position, array in zip(positions, arrays, strict=True):
            filled[position] = array
        return jax.tree.unflatten(treedef, filled)

    return [jnp.asarray(leaves[position]) for position in positions], with_arrays


def is_array(leaf) -> bool:
    """Returns True if a leaf of a tree is an array that JAX can trace."""
    if isinstance(leaf, np.ndarray | np.generic):
        return has_jax_dtype(leaf)
    return isinstance(leaf, jax.Array)


def has_jax_dtype(array: "np.ndarray | np.generic") -> bool:
    """Returns False for objects, strings, times and records, which JAX has no dtypes for."""
    # Not by kind alone: bfloat16 and float8 are of the kind of records.
    return array.dtype.kind not in "OSUMm" and array.dtype.fields is None and array.dtype.type is not np.void


def arrays_of(values: Iterable[Value]) -> list[jax.Array]:
    """Returns the arrays of values."""
    return [jnp.asarray(value.array) for value in values]


def cast(array, dtype):
    """Casts a floating array, or the number of a literal, to `dtype`; other arrays and dtype None change nothing."""
    if dtype is None or not (is_floating(array) or isinstance(array, float)):
        return array
    return array if getattr(array, "dtype", None) == dtype else jnp.asarray(array).astype(dtype)


def cast_like(arrays: Iterable, avals: Iterable) -> list:
    """Casts floating arrays to the dtypes of `avals`: the traced ones, or those that several arrays must agree on."""
    return [cast(array, aval.dtype) for array, aval in zip(arrays, avals, strict=True)]


def avals_of(atoms: Iterable) -> list:
    """Returns the abstract values that the variables and literals of an equation were traced with."""
    return [atom.aval for atom in atoms]
