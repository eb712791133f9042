"""Computes one operation of a half-precision program in float32, and rounds its results."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.compile_ahead import compiled
from mpjax.diagnosis.formats import FLOAT8, NARROW, range_of, round_to_float8
from mpjax.precision.casting.jaxprs import as_function
from mpjax.precision.casting.one_equation import bind
from mpjax.precision.casting.operations import OPERATIONS
from mpjax.precision.casting.primitives import ELEMENTWISE, plain
from mpjax.precision.dtypes import BFLOAT16, FLOAT16, FLOAT32, is_floating


def in_numpy(*arrays: np.ndarray, primitive, params: tuple) -> list[np.ndarray] | None:
    """Evaluates a JAX primitive in NumPy. Returns its results, or None if the caller has to use JAX.

    That is the case if `IN_NUMPY` does not have the primitive, if its rule does not support the case, or if an operand
    has more than 32 bits.

    Args:
      arrays: the operands.
      primitive: a JAX primitive.
      params: the primitive's parameters, as pairs of name and value.
    """
    function = IN_NUMPY.get(primitive.name)
    if function is None or any(array.dtype.itemsize > 4 for array in arrays):
        return None
    result = function(dict(params), *arrays)
    return None if result is None else [np.asarray(result)]


def _divided(params, x: np.ndarray, y: np.ndarray):
    return x / y if x.dtype == np.float32 else None  # XLA's integer division rounds towards zero


def _broadcast(params, x: np.ndarray, *dynamic):
    if dynamic:
        return None
    ones = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        ones[axis] = size
    return np.broadcast_to(x.reshape(ones), params["shape"])


def _reshaped(params, x: np.ndarray, *dynamic):
    return None if dynamic or params["dimensions"] is not None else x.reshape(params["new_sizes"])


def _selected(params, which: np.ndarray, *cases: np.ndarray):
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 and which.dtype == bool else None


IN_NUMPY: Mapping[str, Callable] = {
    **ELEMENTWISE,
    "add_any": ELEMENTWISE["add"],
    "div": _divided,
    "eq": plain(np.equal),
    "ne": plain(np.not_equal),
    "lt": plain(np.less),
    "le": plain(np.less_equal),
    "gt": plain(np.greater),
    "ge": plain(np.greater_equal),
    "is_finite": plain(np.isfinite),
    "copy": plain(np.copy),
    "select_n": _selected,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *arrays: np.concatenate(arrays, params["dimension"]),
}


def round_to(values: jax.Array, dtype: np.dtype, *, top: bool = True, bottom: bool = True) -> jax.Array:
    """Rounds float32 values to the nearest number of a half or float8 dtype, ties to even. The result stays float32.

    As in IEEE 754, overflow gives inf, and small values become subnormal or zero. In e4m3fn, which has no inf, overflow
    gives NaN.

    Args:
      values: float32 array of any shape.
      dtype: the dtype to round to; any other dtype, such as float32, returns the values unchanged.
      top: False keeps float32's largest exponents, so that nothing overflows. bfloat16 has float32's exponents: `top`
        and `bottom` have no effect on it.
      bottom: False keeps float32's smallest exponents and all bits of small values, so that nothing underflows.
    """
    if dtype in (*FLOAT8, FLOAT16) and top != bottom:
        small = abs(values) < np.float32(range_of(dtype).smallest_normal)
        ranged, unranged = round_to(values, dtype), round_to(values, dtype, top=False, bottom=False)
        return _chosen(small, ranged, unranged) if bottom else _chosen(small, unranged, ranged)
    ranged = top and bottom
    if dtype in FLOAT8:
        return round_to_float8(values, dtype=dtype, ranged=ranged)
    if dtype == BFLOAT16:
        return _with_bits(values, mantissa_bits=7)
    if dtype != FLOAT16:
        return values
    if not ranged:
        return _with_bits(values, mantissa_bits=10)
    return _round_to_float16(values)


@functools.partial(compiled, numpy=np.where)
def _chosen(which: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """Selects elements of `yes` where `which` is True, else of `no`."""
    return jnp.where(which, yes, no)


def _with_bits_numpy(values: np.ndarray, *, mantissa_bits: int) -> np.ndarray:
    # Round to nearest, ties to even: add half of the last kept bit, minus one if that bit is 0. The carry rounds up.
    bits, rest = values.view(np.uint32), 23 - mantissa_bits
    carried = bits + (np.uint32(2 ** (rest - 1) - 1) + (bits >> np.uint32(rest) & np.uint32(1)))
    return np.where(np.isfinite(values), (carried & np.uint32(2**32 - 2**rest)).view(np.float32), values)


@functools.partial(compiled, numpy=_with_bits_numpy)
def _with_bits(values: jax.Array, *, mantissa_bits: int) -> jax.Array:
    """Rounds the significand to `mantissa_bits` bits, ties to even, and keeps float32's exponent range."""
    return jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=mantissa_bits)


@functools.partial(compiled, numpy=lambda values: values.astype(np.float16).astype(np.float32))
def _round_to_float16(values: jax.Array) -> jax.Array:
    """Rounds float32 values to float16, with its subnormal numbers and with inf. The result stays float32."""
    # XLA may remove a cast to float16 and back, but not reduce_precision, which flushes subnormals to zero.
    normal = jax.lax.reduce_precision(values, exponent_bits=5, mantissa_bits=10)
    # Below 2^-14 the spacing of float16 is 2^-24; jnp.round rounds ties to even.
    subnormal = jnp.round(values * np.float32(2**24)) * np.float32(2**-24)
    return jnp.where(jnp.abs(values) < np.float32(2**-14), subnormal, normal)


def in_half_dtype(values: jax.Array, dtype: np.dtype) -> jax.Array:
    """Casts float32 values that are already rounded to a half dtype to that dtype: the same numbers in half the memory.

    With a float8 dtype the values stay float32.
    """
    if dtype in FLOAT8:
        return values
    return _to_bfloat16(values) if dtype == BFLOAT16 else _to_float16(values)


@functools.partial(compiled, numpy=lambda values: values.astype(np.float16))
def _to_float16(values: jax.Array) -> jax.Array:
    return values.astype(FLOAT16)


@functools.partial(compiled, numpy=lambda values: values.astype(BFLOAT16))
def _to_bfloat16(values: jax.Array) -> jax.Array:
    # Casts by bits, because the cast of some processors flushes subnormals to zero.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) >> 16
    halves = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(values), jnp.bfloat16(jnp.nan), halves)


_BITS = frozenset({"nextafter", "bitcast_convert_type"})


def is_half(aval) -> bool:
    """True if an abstract value has a half-precision or float8 dtype."""
    return is_floating(aval) and aval.dtype in NARROW


def casts_down(eqn) -> bool:
    """True if an equation's results may have half precision or float8 although an operand is float32.

    Such an equation is a cast to half precision or float8, or an operation whose operands autocast casts to the compute
    dtype, such as a matrix product.
    """
    name = eqn.primitive.name
    to_half = name == "convert_element_type" and eqn.params["new_dtype"] in NARROW
    return to_half or OPERATIONS.rule(name) == "low"


def is_opaque(eqn) -> bool:
    """True if an equation must run in its own dtypes, because float32 operands would change its meaning.

    It is a kernel, or an operation on the bits of its operand.
    """
    return eqn.primitive.name in _BITS or OPERATIONS.rule(eqn.primitive.name) == "as_traced"


def room_for(values: list):
    """The power of two by which to multiply arrays so that no sum of their values overflows float16.

    This holds for arrays of at most 2^15 values. In larger arrays the magnitudes become at most 1, and a sum may
    overflow. Arrays of integers are ignored. The power is 1 if all floating values are zero, if one of them is inf or
    NaN, or if there are none.
    """
    floats = [x for x in values if is_floating(x) and x.size]
    if not floats:
        return 1.0
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x)) for x in floats))
    top = max(0, 15 - int(np.ceil(np.log2(max(x.size for x in floats)))))
    return jnp.where((largest > 0) & jnp.isfinite(largest), jnp.exp2(top - jnp.ceil(jnp.log2(largest))), 1.0)


def as_float32(value):
    """Casts a half-precision or float8 array to float32. Returns any other value unchanged."""
    return converted(value, dtype=FLOAT32) if getattr(value, "dtype", None) in NARROW else value


def _converted_numpy(value: np.ndarray, *, dtype: np.dtype) -> np.ndarray | None:
    return value.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else None  # XLA's casts to integers saturate


@functools.partial(compiled, numpy=_converted_numpy)
def converted(value, *, dtype: np.dtype) -> jax.Array:
    """Casts an array to another dtype."""
    return jax.lax.convert_element_type(value, dtype)


@functools.partial(compiled, numpy=in_numpy)
def _bound(*values, primitive, params: tuple) -> list:
    """Binds a primitive: computes its results, in NumPy if the operands are small.

    `params` are pairs of name and value.
    """
    return list(bind(primitive, values, dict(params)))


def _same(x, params):
    return x


_UNTRACKED: Mapping[str, Callable] = {
    **dict.fromkeys(("pvary", "pcast", "reshard"), _same),
    "psum_invariant": lambda x, params: jax.lax.psum(x, params["axes"]),
    "all_gather_invariant": lambda x, params: jax.lax.all_gather(
        x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"]
    ),
}
"""Equivalents of operations that exist only where JAX tracks which values vary over devices."""


def results_of(
    eqn, values: list, debug_info, *, true_half: bool, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> list:
    """Computes the results of an equation. Half-precision results are returned in float32.

    Nothing is rounded to half precision unless `true_half` is set. Small results may be NumPy arrays.

    Args:
      eqn: an equation of a jaxpr.
      values: the operands; half-precision operands are given in float32.
      debug_info: the debug info of the jaxpr.
      true_half: True to cast the operands to their half dtypes and compute in those, as the device does; False to
        compute in float32.
      precision: the precision of matrix products in float32. The default is true float32 on every device.
    """
    if (untracked := _UNTRACKED.get(eqn.primitive.name)) is not None:
        return [untracked(x, eqn.params) for x in values]
    if true_half:
        operands = [
            converted(x, dtype=atom.aval.dtype) if is_half(atom.aval) else x
            for x, atom in zip(values, eqn.invars, strict=True)
        ]
        if is_opaque(eqn):
            # Kernels and layout constraints take no NumPy arrays.
            return [as_float32(x) for x in as_function(eqn, debug_info)(*map(jnp.asarray, operands))]
        return [as_float32(x) for x in _bound(*operands, primitive=eqn.primitive, params=tuple(eqn.params.items()))]
    if eqn.primitive.name == "convert_element_type":
        new = FLOAT32 if eqn.params["new_dtype"] in NARROW else eqn.params["new_dtype"]
        return [values[0] if values[0].dtype == new else converted(values[0], dtype=new)]
    params = {
        name: FLOAT32 if name in ("preferred_element_type", "dtype") and value in NARROW else value
        for name, value in eqn.params.items()
    }
    if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
        params["precision"] = (precision, precision)  # the program's own precision may support half dtypes only
    return _bound(*values, primitive=eqn.primitive, params=tuple(params.items()))
