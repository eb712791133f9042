"""Products of half-precision operands that leave in float32, forward; backward they are in half precision."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision import CONVOLUTION, DOT_GENERAL


X = jnp.abs(jax.random.normal(jax.random.key(0), (4, 8)))
MATRIX = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
def test_the_result_is_that_of_float32_operands_and_the_slope_that_of_half_ones(half):
    x, kernel = X.astype(half), X.T.astype(half)
    y, slope = jax.jvp(lambda x: DOT_GENERAL(x, kernel, MATRIX), (x,), (x,))
    np.testing.assert_allclose(y, x.astype(jnp.float32) @ kernel.astype(jnp.float32), rtol=1e-6)
    np.testing.assert_array_equal(slope, (x @ kernel).astype(jnp.float32))
    assert jax.grad(lambda x: jnp.sum(DOT_GENERAL(x, kernel, MATRIX)))(x).dtype == half


def test_wider_operands_are_multiplied_as_they_are():
    np.testing.assert_array_equal(DOT_GENERAL(X, X.T, MATRIX), X @ X.T)
    assert "custom_jvp" not in str(jax.make_jaxpr(lambda x: DOT_GENERAL(x, x.T, MATRIX))(X))


def test_a_convolution_leaves_in_float32():
    x, kernel = X[None].astype(jnp.bfloat16), X.T[None].astype(jnp.bfloat16)
    y = CONVOLUTION(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y[0], x[0].astype(jnp.float32) @ kernel[0].astype(jnp.float32), rtol=1e-6)


ROWS = (((1,), (1,)), ((), ()))


@pytest.mark.parametrize(("size", "padded"), [(4097, 4160), (4160, 4160), (4095, 4095)])
@pytest.mark.parametrize("numbers", [MATRIX, ROWS], ids=["linear", "tied"])
def test_long_rows_are_aligned_forward_and_backward_and_nobody_sees_it(size, padded, numbers):
    x, table = X.astype(jnp.bfloat16), jax.random.normal(jax.random.key(1), (size, 8), jnp.bfloat16)
    kernel = table.T if numbers is MATRIX else table
    weights = jax.random.normal(jax.random.key(2), (4, size))

    def loss(x, kernel):
        return jnp.sum(DOT_GENERAL(x, kernel, numbers) * weights)

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, kernel))
    results = [set(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\] = dot_general", jaxpr)]
    assert sorted(map(max, results)) == [8, padded, padded]
    y = jax.jit(lambda x, kernel: DOT_GENERAL(x, kernel, numbers))(x, kernel)
    np.testing.assert_allclose(y, x.astype(jnp.float32) @ table.T.astype(jnp.float32), rtol=1e-5, atol=1e-6)
    dx, dkernel = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
    half = weights.astype(jnp.bfloat16)
    np.testing.assert_allclose(dx.astype(jnp.float32), (half @ table).astype(jnp.float32), rtol=2**-7, atol=0.5)
    expected = x.T @ half if numbers is MATRIX else half.T @ x
    assert dkernel.shape == kernel.shape
    np.testing.assert_array_equal(dkernel.astype(jnp.float32), expected.astype(jnp.float32))
