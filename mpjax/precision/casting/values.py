"""Facts that autocast knows about each array. The dtype of an array may differ from its traced dtype."""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import is_floating


class Origin(enum.IntEnum):
    """The inputs that an array depends on. The origin of a result is the largest of its operands'; see `origins.py`.

    Attributes:
      NUMBERS: only numbers of the program, and random keys.
      PARAMETERS: parameters, but nothing of the batch.
      UNKNOWN: unknown.
      BATCH: inputs other than parameters.
    """

    NUMBERS = 0
    PARAMETERS = 1
    UNKNOWN = 2
    BATCH = 3


class Value(NamedTuple):
    """An array and the known facts about its origin.

    Attributes:
      array: the array or tracer, or the number of a literal.
      number: the value of all its elements, if it is known at trace time (see `numbers.py`). The array then takes the
        dtype of the other operands.
      peak: True for the largest of several values. Differences from it, as in a softmax, are computed in float32.
      own: True if the program made it only from keys, integers and numbers, and so chose its dtype.
      constant: True if the program made it without a product, from these and from arrays that it closes over.
      origin: the inputs that it depends on.
    """

    array: Any
    number: float | None = None
    peak: bool = False
    own: bool = False
    constant: bool = False
    origin: Origin = Origin.UNKNOWN

    @property
    def fact(self) -> "Value":
        """The value without its array and without `peak`, for use inside a call or a loop."""
        return Value(None, self.number, own=self.own, constant=self.constant, origin=self.origin)


UNKNOWN = Value(None)


def values_of(arrays: Iterable, facts: Sequence[Value] = ()) -> list[Value]:
    """Wraps arrays as values, with `facts` about them if given."""
    arrays = list(arrays)
    return [fact._replace(array=array) for array, fact in zip(arrays, facts or [UNKNOWN] * len(arrays), strict=True)]


def joined(values: Iterable[Value]) -> Origin:
    """The origin of a result that is computed from values: the largest of theirs."""
    return max((value.origin for value in values), default=Origin.NUMBERS)


def computed_from(inputs: Iterable[Value], arrays: Iterable) -> list[Value]:
    """Wraps `arrays`, the results of a call or loop with `inputs`, as values; only their origin is known."""
    origin = joined(inputs)
    return [Value(array, origin=origin) for array in arrays]


def split_arrays(tree) -> tuple[list[jax.Array], Callable]:
    """Collects the arrays of a tree; also returns a function that builds the tree with other arrays in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def with_arrays(arrays):
        filled = list(leaves)
        for position, array in zip(positions, arrays, strict=True):
            filled[position] = array
        return jax.tree.unflatten(treedef, filled)

    return [jnp.asarray(leaves[position]) for position in positions], with_arrays


def is_array(leaf) -> bool:
    """True for an array that JAX can trace; False for other leaves."""
    if isinstance(leaf, np.ndarray | np.generic):
        return has_jax_dtype(leaf)
    return isinstance(leaf, jax.Array)


def has_jax_dtype(array: "np.ndarray | np.generic") -> bool:
    """False for objects, strings, times and records, which have no dtype in JAX."""
    # Not by kind alone: bfloat16 and float8 have the kind of records.
    return array.dtype.kind not in "OSUMm" and array.dtype.fields is None and array.dtype.type is not np.void


def arrays_of(values: Iterable[Value]) -> list[jax.Array]:
    """Extracts the arrays of values; the number of a literal becomes an array."""
    return [jnp.asarray(value.array) for value in values]


def cast(array, dtype):
    """Casts a floating array, or the number of a literal, to `dtype`; dtype None and other arrays change nothing."""
    if dtype is None or not (is_floating(array) or isinstance(array, float)):
        return array
    return array if getattr(array, "dtype", None) == dtype else jnp.asarray(array).astype(dtype)


def cast_like(arrays: Iterable, avals: Iterable) -> list:
    """Casts floating arrays to the dtypes of `avals`: traced dtypes, or common dtypes of several arrays."""
    return [cast(array, aval.dtype) for array, aval in zip(arrays, avals, strict=True)]


def avals_of(atoms: Iterable) -> list:
    """The abstract values of an equation's variables and literals, as traced."""
    return [atom.aval for atom in atoms]
