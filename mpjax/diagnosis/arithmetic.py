"""One operation of a half-precision program, computed in float32: what it takes, what it gives, what it means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.compiled import compiled
from mpjax.diagnosis.numpy_operations import in_numpy
from mpjax.precision.casting.binding import bind
from mpjax.precision.casting.jaxprs import as_function
from mpjax.precision.casting.operations import OPERATIONS
from mpjax.precision.dtypes import FLOAT32, HALF, is_floating


SUMS = frozenset({"reduce_sum", "reduce_window_sum", "cumsum", "scatter-add", "scatter-sub"})
PRODUCTS = frozenset({"reduce_prod", "cumprod", "integer_pow", "scatter-mul"}) | frozenset(
    {"logistic", "exp2", "expm1", "asin", "acos", "asinh", "atanh", "atan2"}
)
"""They round after each of many additions or multiplications, which only the device itself does as it does.

The functions are made of several operations by XLA, of which each rounds: in bfloat16 the logistic of 6 is 1.
"""

_BITS = frozenset({"nextafter", "bitcast_convert_type"})


def is_half(aval) -> bool:
    """Whether a variable is a half-precision number."""
    return is_floating(aval) and aval.dtype in HALF


def casts_down(eqn) -> bool:
    """Whether operands are brought to half precision whatever they are: by a product in a layer, or by a cast."""
    name = eqn.primitive.name
    to_half = name == "convert_element_type" and eqn.params["new_dtype"] in HALF
    return to_half or OPERATIONS.rule(name) == "low"


def is_opaque(eqn) -> bool:
    """Whether an equation means something in its own dtypes only: kernels, bits."""
    return eqn.primitive.name in _BITS or OPERATIONS.rule(eqn.primitive.name) == "as_traced"


def room_for(values: list):
    """A power of two that brings values to where float16 has all its bits and their sum does not overflow."""
    floats = [x for x in values if is_floating(x) and x.size]
    if not floats:
        return 1.0
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x)) for x in floats))
    top = max(0, 15 - int(np.ceil(np.log2(max(x.size for x in floats)))))
    return jnp.where((largest > 0) & jnp.isfinite(largest), jnp.exp2(top - jnp.ceil(jnp.log2(largest))), 1.0)


def widened(value):
    """A half-precision array in float32; all others as they are."""
    return converted(value, dtype=FLOAT32) if getattr(value, "dtype", None) in HALF else value


def _converted_numpy(value: np.ndarray, *, dtype: np.dtype) -> np.ndarray | None:
    return value.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else None  # XLA saturates integers


@functools.partial(compiled, numpy=_converted_numpy)
def converted(value, *, dtype: np.dtype) -> jax.Array:
    """An array in another dtype."""
    return jax.lax.convert_element_type(value, dtype)


@functools.partial(compiled, numpy=in_numpy)
def _bound(*values, primitive, params: tuple) -> list:
    return list(bind(primitive, values, dict(params)))


def results_of(
    eqn, values: list, debug_info, *, true_half: bool, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> list:
    """The results of an equation, those of half precision held in float32.

    Args:
      eqn: the equation.
      values: its operands, those of half precision in float32.
      debug_info: of its jaxpr.
      true_half: whether to compute in half precision itself.
      precision: of products; by default float32 itself, where a device would take fewer bits.
    """
    if true_half:
        given = [
            converted(x, dtype=atom.aval.dtype) if is_half(atom.aval) else x
            for x, atom in zip(values, eqn.invars, strict=True)
        ]
        if is_opaque(eqn):
            return [widened(x) for x in as_function(eqn, debug_info)(*given)]
        return [widened(x) for x in _bound(*given, primitive=eqn.primitive, params=tuple(eqn.params.items()))]
    if eqn.primitive.name == "convert_element_type":
        new = FLOAT32 if eqn.params["new_dtype"] in HALF else eqn.params["new_dtype"]
        return [values[0] if values[0].dtype == new else converted(values[0], dtype=new)]
    params = {
        name: FLOAT32 if name in ("preferred_element_type", "dtype") and value in HALF else value
        for name, value in eqn.params.items()
    }
    if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
        params["precision"] = (precision, precision)  # an algorithm of the program's may be for half only
    return _bound(*values, primitive=eqn.primitive, params=tuple(params.items()))
