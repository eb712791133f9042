"""Defines the dtypes that a diagnosis rounds to, half precision and float8, and rounds float32 values to float8.

The rounded values are exactly those of a cast to float8. e4m3fn has no inf: values more than half a step above 448
become NaN. e5m2 has inf, like the formats of IEEE 754.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpjax.diagnosis.compile_ahead import compiled
from mpjax.precision.dtypes import HALF, Range, float_range
from mpjax.precision.float8.recipes import E4M3, E5M2


FLOAT8 = (E4M3, E5M2)

NARROW = (*HALF, *FLOAT8)
"""The dtypes that a diagnosis rounds to. Docstrings call them all half precision, unless they name float8."""

_LARGEST: Mapping[np.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}
_BITS: Mapping[np.dtype, int] = {E4M3: 3, E5M2: 2}
_LOWEST: Mapping[np.dtype, int] = {E4M3: -6, E5M2: -14}


def range_of(dtype: np.dtype) -> Range:
    """The largest, smallest normal and smallest subnormal number, and the epsilon, of a floating or float8 dtype."""
    if dtype not in FLOAT8:
        return float_range(dtype)
    info = ml_dtypes.finfo(dtype)
    return Range(float(info.max), float(info.tiny), float(info.smallest_subnormal), float(info.eps))


def _float8_numpy(values: np.ndarray, *, dtype: np.dtype, ranged: bool) -> np.ndarray | None:
    if not ranged or values.dtype != np.float32:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        return values.astype(dtype).astype(np.float32)


@functools.partial(compiled, numpy=_float8_numpy)
def round_to_float8(values: jax.Array, *, dtype: np.dtype, ranged: bool) -> jax.Array:
    """Rounds float32 values to the nearest number of a float8 dtype, ties to even. The result stays float32.

    It is a NumPy array if `values` is small and the default device is a CPU (`compiled`).

    Args:
      values: float32 array of any shape.
      dtype: float8_e4m3fn or float8_e5m2.
      ranged: True applies float8's range: values beyond it become inf, or NaN in e4m3fn, and small values become
        subnormal or zero. False rounds the significand only, so that nothing overflows or underflows.
    """
    normal = jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=_BITS[dtype])
    if not ranged:
        return normal
    # Below the normal numbers the spacing is constant; jnp.round rounds ties to even.
    spacing = np.float32(2.0 ** (_LOWEST[dtype] - _BITS[dtype]))
    subnormal = jnp.round(values / spacing) * spacing
    rounded = jnp.where(jnp.abs(values) < np.float32(2.0 ** _LOWEST[dtype]), subnormal, normal)
    beyond = np.float32(np.nan) if dtype == E4M3 else jnp.copysign(np.float32(np.inf), values)
    return jnp.where(jnp.abs(rounded) > _LARGEST[dtype], beyond, rounded)
