"""Which scalars are known when a program is traced, and which dtypes hold them.

A number of the program's own, as the 0.5 in `x * 0.5`, takes the dtype of the array it meets, if that holds it: rounds
it no worse than other numbers. So does what is computed from such numbers alone, as in `x / jnp.sqrt(64.0)`. Any other
scalar is an array like others: in float32 it makes float32 of what it meets. What an array holds that is an argument is
never looked at, so that eager execution, `jit` and `scan` agree.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax.core
import numpy as np

from mpjax.precision.casting.primitives import ELEMENTWISE, plain
from mpjax.precision.dtypes import float_range, is_floating


def number_of(constant) -> float | None:
    """The value of a real scalar that is known now; None for what is no scalar, or not known."""
    if isinstance(constant, jax.core.Tracer) or np.ndim(constant) > 0:
        return None
    array = np.asarray(constant)
    return _checked(array) if is_floating(array) or array.dtype.kind in "iu" else None


def computed(eqn, numbers: Sequence[float | None]) -> float | None:
    """What an equation gives for inputs that are known: the number that all elements of its only output are."""
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
    """Whether `dtype` rounds a number as well as any: -1e9 is -inf in float16, and 1e-8 zero."""
    if not math.isfinite(number):
        return True
    band = float_range(dtype)
    return abs(number) <= band.largest and abs(float(np.asarray(number, dtype)) - number) <= band.epsilon / 2 * abs(
        number
    )


def _checked(array: np.ndarray) -> float:
    """As a Python float; NaN, which is equal to nothing, as infinity, which any dtype holds too."""
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
    # What changes a dtype or a shape leaves the number.
    **dict.fromkeys(
        ("convert_element_type", "stop_gradient", "copy", "broadcast_in_dim", "reshape", "squeeze", "transpose"),
        plain(lambda x: x),
    ),
}
"""Of primitives that compute element by element, and of those that move elements: NumPy's function of the same."""
