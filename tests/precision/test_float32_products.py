"""Products of half-precision operands that leave in float32, forward; backward they are in half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision.layers import CONVOLUTION, DOT_GENERAL


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
