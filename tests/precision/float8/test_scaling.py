"""Scales are powers of two that lose nothing, and what float8 cannot hold is not hidden."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.precision.float8 import E4M3, E5M2, largest_of, quantise, quantise_blocks, quantise_to, scale_of


@pytest.mark.parametrize(
    ("largest", "dtype", "scale"),
    [(448.0, E4M3, 1.0), (449.0, E4M3, 0.5), (1.0, E4M3, 256.0), (1.0, E5M2, 32768.0), (3e38, E4M3, 2.0**-120)],
)
def test_the_scale_is_the_largest_power_of_two_without_overflow(largest, dtype, scale):
    assert float(scale_of(jnp.float32(largest), dtype)) == scale


@pytest.mark.parametrize("largest", [np.inf, np.nan])
def test_inf_and_nan_are_not_scaled(largest):
    assert float(scale_of(jnp.float32(largest), E4M3)) == 1.0


@pytest.mark.slow
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=8))
def test_a_quantised_value_is_that_of_ml_dtypes_and_within_a_sixteenth(numbers):
    x = np.array(numbers, np.float32)
    found = quantise(jnp.asarray(x), E4M3)
    inverse = float(found.inverse)
    assert np.log2(inverse) == np.round(np.log2(inverse))
    np.testing.assert_array_equal(np.asarray(found.values), (x / np.float32(inverse)).astype(ml_dtypes.float8_e4m3fn))
    back = np.asarray(found.values, np.float32) * inverse
    assert np.all(np.abs(back - x) <= np.maximum(np.abs(x) / 16, inverse * 2.0**-10))


@pytest.mark.parametrize(("dtype", "bad"), [(E4M3, np.nan), (E5M2, np.inf)])
def test_an_infinite_value_stays_visible(dtype, bad):
    found = quantise(jnp.array([1.0, np.inf], jnp.float32), dtype)
    np.testing.assert_array_equal(np.asarray(found.values, np.float32) * found.inverse, [1.0, bad])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_not_the_largest(bad):
    assert float(largest_of(jnp.array([1.0, bad, -3.0]))) == 3.0
    np.testing.assert_array_equal(largest_of(jnp.array([[1.0, bad], [bad, bad]]), (1,)), [1.0, 0.0])


def test_a_finite_value_far_beyond_what_is_expected_saturates():
    found = quantise_to(jnp.array([1e10, -1e10, np.nan], jnp.float32), jnp.float32(1e-20), E4M3)
    np.testing.assert_array_equal(np.asarray(found.values, np.float32), [448.0, -448.0, np.nan])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_smallest_normal_numbers_are_quantised(dtype):
    found = quantise(jnp.float32(2.0**-126), dtype)
    assert float(found.values.astype(jnp.float32)) * float(found.inverse) == 2.0**-126


def test_zeros_are_zeros_with_a_finite_inverse():
    found = quantise(jnp.zeros(4, jnp.bfloat16), E4M3)
    assert np.all(np.asarray(found.values, np.float32) == 0)
    assert np.isfinite(float(found.inverse))


def test_rows_have_scales_of_their_own():
    found = quantise(jnp.array([[448.0, 1.0], [1.0, 0.5]]), E4M3, 1)
    np.testing.assert_array_equal(found.inverse, [[1.0], [2.0**-8]])


def test_each_32_numbers_have_a_scale_and_zeros_fill_the_last_block():
    x = jnp.concatenate([jnp.full((1, 32), 448.0), jnp.full((1, 8), 1.0)], axis=1)
    found = quantise_blocks(x, E4M3)
    assert found.values.shape == (1, 64)
    np.testing.assert_array_equal(found.inverse, [[1.0, 2.0**-8]])
    np.testing.assert_array_equal(np.asarray(found.values, np.float32)[0, 32:], [256.0] * 8 + [0.0] * 24)
