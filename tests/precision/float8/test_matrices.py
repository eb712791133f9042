"""The three products of a layer as products of two matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision.float8 import (
    BY_ACTIVATIONS,
    BY_WEIGHT,
    FLOAT8,
    FORWARD,
    MXFP8,
    RECIPES,
    ScaledFloat8,
    derivatives,
    in_float8,
    multiplied,
)


SHAPES = {FORWARD: ((32, 64), (64, 96)), BY_ACTIVATIONS: ((32, 96), (64, 96)), BY_WEIGHT: ((32, 64), (32, 96))}
WAYS = pytest.mark.parametrize("way", SHAPES, ids=["forward", "by activations", "by weight"])
FLOAT32 = np.dtype("float32")


def matrices(way):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES[way]]


def plain(way, a, b):
    return np.tensordot(np.asarray(a, np.float64), np.asarray(b, np.float64), axes=way.axes)


@WAYS
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_each_product_is_that_of_its_axes_to_two_digits(way, recipe):
    a, b = matrices(way)
    exact = plain(way, a, b)
    found = np.asarray(jax.jit(functools.partial(in_float8, recipe, way, FLOAT32))(a, b))
    assert found.shape == exact.shape
    assert np.linalg.norm(found - exact) < 0.08 * np.linalg.norm(exact)


def test_gradients_alone_are_in_the_wide_format_and_need_exact_sums():
    assert [str(FORWARD.dtype(FLOAT8, i)) for i in (0, 1)] == ["float8_e4m3fn"] * 2
    assert [str(BY_WEIGHT.dtype(FLOAT8, i)) for i in (0, 1)] == ["float8_e4m3fn", "float8_e5m2"]
    assert [str(BY_ACTIVATIONS.dtype(MXFP8, i)) for i in (0, 1)] == ["float8_e4m3fn"] * 2
    assert [way.exact for way in SHAPES] == [False, True, True]


def test_scales_whose_product_underflows_leave_a_result_that_does_not():
    values = jnp.full((16, 16), 256, jnp.float8_e4m3fn)
    tiny, small = (ScaledFloat8(values, jnp.float32(2.0**exponent)) for exponent in (-100, -40))
    found = multiplied(FORWARD, FLOAT32, tiny, small)
    assert float(found[0, 0]) == 16 * 2.0 ** (16 - 140)


@WAYS
def test_derivatives_are_those_of_the_product_that_is_not_in_float8(way):
    a, b = matrices(way)
    u = jnp.asarray(np.random.default_rng(1).normal(size=plain(way, a, b).shape), jnp.float32)
    wanted = jax.grad(lambda a, b: jnp.sum(jnp.tensordot(a, b, axes=way.axes) * u), (0, 1))(a, b)
    for one, other in zip(derivatives(way, FLOAT32, a, b, u), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
