"""A function that casts by itself keeps its dtypes and products, and gets sums in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision.casting.own_sums import with_sums_in_float32


X = jnp.ones((512, 4), jnp.bfloat16)


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (lambda x: jnp.cumsum(x, 0)[-1], 512),
        (lambda x: jax.ops.segment_sum(x, jnp.zeros(512, int), 1)[0], 512),
        (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (512, 1), (1, 1), "VALID")[0], 512),
    ],
    ids=["cumsum", "segment_sum", "window"],
)
def test_a_sum_of_512_ones_is_512_in_the_dtype_of_the_function(fn, wanted):
    found = with_sums_in_float32(fn)(X)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.full(4, wanted, jnp.bfloat16))


def test_products_exponentials_and_squares_stay_as_they_are():
    def fn(x):
        rows = x[jnp.zeros(512, int)]
        return jnp.exp(rows) * rows * rows, rows.T @ rows, jax.nn.softmax(rows)

    for found, own in zip(with_sums_in_float32(fn)(X / 3), fn(X / 3), strict=True):
        np.testing.assert_array_equal(found, own)


def test_a_function_without_such_sums_is_called_as_it_is():
    calls = []
    assert with_sums_in_float32(lambda x: calls.append(x) or x)(X) is X
    assert len(calls) == 2
    assert calls[1] is X
