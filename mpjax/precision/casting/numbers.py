"""The scalars that are known when a program is traced, and the dtypes that hold them.

A number written in the program, like the 0.5 in `x * 0.5`, takes the dtype of the array that it is combined with, if
that dtype holds it. A dtype holds a number if it rounds it no worse than other numbers. The same applies to results
computed only from these numbers, as in `x / jnp.sqrt(64.0)`. Any other scalar is an ordinary array: in float32 it
promotes other operands to float32. The values of arguments are never read, so that eager execution, `jit` and `scan`
agree.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax.precision.casting.primitives import ARRANGES, ELEMENTWISE, plain
from mpjax.precision.dtypes import float_range, is_floating


def number_of(constant) -> float | None:
    """The value of a real scalar that is known at trace time; None if it is unknown or not a scalar."""
    if isinstance(constant, Tracer) or np.ndim(constant) > 0:
        return None
    if jnp.issubdtype(getattr(constant, "dtype", np.dtype(float)), jax.dtypes.extended):  # a typed random key
        return None
    array = np.asarray(constant)
    return _checked(array) if is_floating(array) or array.dtype.kind in "iu" else None


def computed(eqn, numbers: Sequence[float | None]) -> float | None:
    """Computes the number that all elements of the equation's only output equal, for known inputs; None if unknown."""
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
    """True if `dtype` rounds a number as precisely as others. In float16, -1e9 overflows and 1e-8 underflows."""
    if not math.isfinite(number):
        return True
    band = float_range(dtype)
    return abs(number) <= band.largest and abs(float(np.asarray(number, dtype)) - number) <= band.epsilon / 2 * abs(
        number
    )


def bounds(dtype: np.dtype, number: float) -> bool:
    """True if `dtype` holds a number that is used as a bound, in a comparison or a clip.

    Half precision rounds the bound 1 - 1e-6 to 1, the value that this bound excludes.
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
