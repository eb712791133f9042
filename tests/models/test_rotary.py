"""Rotary position embeddings: the formula of the paper, and the scalings of its frequencies."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.models import LinearScaling, Llama3Scaling, Rope, Rotation, YarnScaling, rotate, rotation


F32 = np.dtype("float32")


def upto(count):
    return jnp.arange(count, dtype=jnp.int32)[None]


def test_each_pair_is_a_complex_number_that_is_turned_by_its_angle():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    actual = rotate(x, rotation(Rope(theta=100.0), upto(5), 8, F32))
    pairs = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])
    angles = np.arange(5)[:, None] * 100.0 ** (-np.arange(4) / 4)[None, :]
    turned = pairs * np.exp(1j * angles)[None, :, None, :]
    np.testing.assert_allclose(actual, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


def test_without_angles_nothing_turns():
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
    assert np.array_equal(rotate(x, rotation(None, upto(3), 4, F32)), x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_angles_are_float32_in_half_precision_too(dtype):
    """In bfloat16, 257 is 256."""
    angles = rotation(Rope(), upto(258), 4, np.dtype(dtype))
    assert {table.dtype for table in angles} == {F32}
    np.testing.assert_allclose(angles.cos[0, 257], [math.cos(257.0), math.cos(2.57)], atol=1e-4)
    assert rotate(jnp.ones((1, 258, 1, 4), dtype), angles).dtype == dtype


def test_the_product_is_in_float32_and_rounds_once():
    x = jnp.asarray([1.0, 1.0], jnp.bfloat16).reshape(1, 1, 1, 2)
    third = jnp.full((1, 1, 1), 1 / 3, jnp.float32)
    actual = rotate(x, Rotation(third, -third))
    assert actual.ravel().tolist() == [float(jnp.bfloat16(2 / 3)), 0.0]


def frequencies(scaling):
    plain, scaled = (Rope(theta=10_000.0, scaling=value).frequencies(64) for value in (None, scaling))
    return scaled[0] / plain[0], scaled[1]


def test_linear_scaling_divides_all_frequencies():
    assert frequencies(LinearScaling(factor=4.0))[0].tolist() == pytest.approx([0.25] * 32)


def test_the_scaling_of_llama_3_keeps_high_frequencies_and_divides_low_ones():
    factors, attention = frequencies(Llama3Scaling(factor=8.0, low=1.0, high=4.0, length=1024))
    turns = 1024 * 10_000.0 ** (-np.arange(32) / 32) / (2 * math.pi)
    assert attention == 1.0
    np.testing.assert_allclose(factors[turns > 4], 1.0)
    np.testing.assert_allclose(factors[turns < 1], 0.125)
    between = (turns > 1) & (turns < 4)
    share = (turns[between] - 1) / 3
    np.testing.assert_allclose(factors[between], share + (1 - share) / 8)
    assert between.sum() == 5


def test_yarn_goes_over_from_feature_to_feature_and_sharpens_attention():
    factors, attention = frequencies(YarnScaling(factor=4.0, length=1024))
    assert attention == pytest.approx(0.1 * math.log(4) + 1)
    # 32 turns within 1024 positions: feature 32 log(1024 / (64 pi)) / log(10000) = 5.7; one turn: 17.7
    np.testing.assert_allclose(factors[:6], 1.0)
    np.testing.assert_allclose(factors[18:], 0.25)
    np.testing.assert_allclose(factors[5:19], 1 - 0.75 * np.arange(14) / 13)
    assert frequencies(YarnScaling(factor=4.0, length=1024, attention_factor=1.0))[1] == 1.0
