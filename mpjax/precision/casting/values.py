"""What autocast knows about each array: which inputs it depends on, and its number if it is known at trace time.

A number written in the program, like the 0.5 in `x * 0.5`, takes the dtype of the array that it is combined with, if
that dtype holds it. A dtype holds a number if it rounds it no worse than other numbers. The same applies to results
computed only from these numbers, as in `x / jnp.sqrt(64.0)`. Any other scalar is an ordinary array: in float32 it
promotes other operands to float32. The values of arguments are never read, so that eager execution, `jit` and `scan`
agree.
"""

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax.precision.casting.primitives import ARRANGES, ELEMENTWISE, plain
from mpjax.precision.dtypes import float_range, is_floating


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
    """An array of a program that autocast runs, and what is known of it at trace time.

    Attributes:
      array: the array or tracer, or the number of a literal; None in a value that only has facts.
      number: the value of all its elements, if it is known at trace time; else None. A known number takes the dtype of
        the other operands.
      peak: True for the largest of several values. Differences from it, as in a softmax, are computed in float32.
      from_numbers: True if the program made it only from keys, integers and numbers, and so chose its dtype.
      constant: like `from_numbers`, but also from arrays that the program closes over, without a matrix product.
      origin: the inputs that it depends on.
    """

    array: Any
    number: float | None = None
    peak: bool = False
    from_numbers: bool = False
    constant: bool = False
    origin: Origin = Origin.UNKNOWN

    @property
    def fact(self) -> "Value":
        """A copy without the array and without `peak`, for the variable of a call or loop that gets the array."""
        return Value(None, self.number, from_numbers=self.from_numbers, constant=self.constant, origin=self.origin)


UNKNOWN = Value(None)


def values_of(arrays: Iterable, facts: Sequence[Value] = ()) -> list[Value]:
    """Wraps arrays as values, with one of `facts` for each if given; without facts, nothing is known of them."""
    arrays = list(arrays)
    return [fact._replace(array=array) for array, fact in zip(arrays, facts or [UNKNOWN] * len(arrays), strict=True)]


def joined(values: Iterable[Value]) -> Origin:
    """The origin of a result that is computed from values: the largest of theirs; `NUMBERS` without values."""
    return max((value.origin for value in values), default=Origin.NUMBERS)


def computed_from(inputs: Iterable[Value], arrays: Iterable) -> list[Value]:
    """Wraps the results of a call or loop as values with the joined origin of its `inputs`; nothing else is known."""
    origin = joined(inputs)
    return [Value(array, origin=origin) for array in arrays]


def split_arrays(tree) -> tuple[list[jax.Array], Callable]:
    """Collects the arrays of a tree in order, NumPy arrays as JAX arrays; other leaves, such as numbers, stay behind.

    Also returns a function of a sequence of other arrays, which builds the tree with these in place of its own.
    """
    leaves, treedef = jax.tree.flatten(tree)
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def with_arrays(arrays):
        filled = list(leaves)
        for position, array in zip(positions, arrays, strict=True):
            filled[position] = array
        return jax.tree.unflatten(treedef, filled)

    return [jnp.asarray(leaves[position]) for position in positions], with_arrays


def is_array(leaf) -> bool:
    """True for a JAX array, and a NumPy array or scalar with a dtype of JAX; False for other leaves."""
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
    """Casts a floating array, or a Python float, to an array of `dtype`.

    Integers and keys stay unchanged, and so does everything if `dtype` is None.
    """
    if dtype is None or not (is_floating(array) or isinstance(array, float)):
        return array
    return array if getattr(array, "dtype", None) == dtype else jnp.asarray(array).astype(dtype)


def cast_like(arrays: Iterable, avals: Iterable) -> list:
    """Casts each floating array to the dtype of the abstract value at its index in `avals`; others stay unchanged."""
    return [cast(array, aval.dtype) for array, aval in zip(arrays, avals, strict=True)]


def avals_of(atoms: Iterable) -> list:
    """The abstract values of an equation's variables and literals, as traced."""
    return [atom.aval for atom in atoms]


def number_of(constant) -> float | None:
    """The value of a floating or integer scalar that is known at trace time, as a float; inf stands for NaN.

    None for a tracer, an array with axes, a bool, a complex number or a random key.
    """
    if isinstance(constant, Tracer) or np.ndim(constant) > 0:
        return None
    if jnp.issubdtype(getattr(constant, "dtype", np.dtype(float)), jax.dtypes.extended):  # a typed random key
        return None
    array = np.asarray(constant)
    return _checked(array) if is_floating(array) or array.dtype.kind in "iu" else None


def computed(eqn, numbers: Sequence[float | None]) -> float | None:
    """Computes the number that all elements of an equation's output equal, from the numbers of its inputs.

    It is rounded to the traced dtype of the output. None if one of `numbers` is None, or if the primitive is not
    elementwise and does not merely move elements.
    """
    function = _FUNCTIONS.get(eqn.primitive.name)
    if function is None or not numbers or None in numbers:
        return None
    dtype = eqn.outvars[0].aval.dtype
    if not is_floating(eqn.outvars[0].aval) and dtype.kind not in "iu":
        return None
    with np.errstate(all="ignore"):
        inputs = (
            np.float64(number).astype(invar.aval.dtype) for number, invar in zip(numbers, eqn.invars, strict=True)
        )
        return _checked(np.asarray(function(eqn.params, *inputs)).astype(dtype))


def holds(dtype: np.dtype, number: float) -> bool:
    """True if `dtype` rounds a number with a relative error of at most epsilon / 2, or the number is inf or NaN.

    False if the number overflows or loses bits as a subnormal: -1e9 or 1e-8 in float16.
    """
    if not math.isfinite(number):
        return True
    band = float_range(dtype)
    return abs(number) <= band.largest and abs(float(np.asarray(number, dtype)) - number) <= band.epsilon / 2 * abs(
        number
    )


def bounds(dtype: np.dtype, number: float) -> bool:
    """True if `dtype` holds a number well enough for a bound, in a comparison or a clip: a stricter `holds`.

    The error must also be small beside the distance of the number from 1 and -1. Half precision rounds the bound
    1 - 1e-6 to 1, the value that this bound excludes.
    """
    if not holds(dtype, number) or not math.isfinite(number):
        return holds(dtype, number)
    rounded = float(np.asarray(number, dtype))
    return rounded == number or abs(rounded - number) <= float_range(dtype).epsilon * abs(1 - abs(number))


def _checked(array: np.ndarray) -> float:
    """Converts to a Python float. NaN, which is not equal to itself, becomes inf; every dtype holds both."""
    number = float(array)
    return math.inf if math.isnan(number) else number


_FUNCTIONS: Mapping[str, Callable] = {
    **{name: plain(getattr(np, name)) for name in ("sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log1p")},
    **{name: plain(getattr(np, name)) for name in ("sin", "cos", "tan", "tanh")},
    **ELEMENTWISE,
    "rsqrt": plain(lambda x: 1 / np.sqrt(x)),
    "logistic": plain(lambda x: 1 / (1 + np.exp(-x))),
    "pow": plain(np.power),
    "div": plain(lambda x, y: x / y if is_floating(x) else np.trunc(x / y)),
    "integer_pow": lambda params, x: np.power(x, params["y"]),
    # These change the dtype or the shape, not the number.
    **dict.fromkeys(("convert_element_type", *ARRANGES), plain(lambda x: x)),
}
"""Primitives that compute elementwise or move elements, as NumPy functions of `(parameters, *arrays)`."""
