"""Rounding to float8 as ml_dtypes does, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.diagnosis import FLOAT8, range_of, round_to_float8
from mpjax.precision import Range


EVERY = np.arange(2**16, dtype=np.uint16)
SPREAD = np.random.default_rng(0).normal(size=2**16) * np.exp2(np.random.default_rng(1).integers(-20, 20, 2**16))
VALUES = {
    "every bfloat16": EVERY.view(ml_dtypes.bfloat16).astype(np.float32),
    "every float16": EVERY.view(np.float16).astype(np.float32),
    "float32 of many sizes": SPREAD.astype(np.float32),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "in NumPy"])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_every_value_is_that_of_ml_dtypes(values, dtype, compiled):
    values = jnp.asarray(values) if compiled else values

    def rounded(values):
        return round_to_float8(values, dtype=dtype, ranged=True)

    found = np.asarray((jax.jit(rounded) if compiled else rounded)(values))
    np.testing.assert_array_equal(found, np.asarray(values).astype(dtype).astype(np.float32))


@pytest.mark.parametrize(("dtype", "beyond"), [(FLOAT8[0], np.nan), (FLOAT8[1], np.inf)])
def test_without_a_range_only_the_significand_is_rounded(dtype, beyond):
    values = jnp.array([1e6, 1e-12], jnp.float32)
    np.testing.assert_array_equal(round_to_float8(values, dtype=dtype, ranged=True), [beyond, 0])
    np.testing.assert_allclose(round_to_float8(values, dtype=dtype, ranged=False), values, rtol=0.13)


def test_ranges():
    assert range_of(FLOAT8[0]) == Range(448.0, 2.0**-6, 2.0**-9, 2.0**-3)
    assert range_of(FLOAT8[1]) == Range(57344.0, 2.0**-14, 2.0**-16, 2.0**-2)
    assert range_of(np.dtype("float16")).largest == 65504.0
