"""Max-pooling is that of XLA, with a gradient that is added in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import max_pool


def plain(x, window, stride, padding):
    return nnx.max_pool(x, (window, window), strides=(stride, stride), padding=padding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "stride", "padding", "size"),
    [
        (3, 2, ((1, 1), (1, 1)), 8),
        (3, 2, ((1, 1), (1, 1)), 7),
        (2, 2, ((0, 0), (0, 0)), 5),
        (2, 2, ((0, 1), (0, 1)), 5),
        (4, 1, ((3, 0), (1, 2)), 6),
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_values_and_gradients_are_those_of_xla(window, stride, padding, size, ties):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (2, size, size + 2, 3))
    x = jnp.round(x) if ties else x
    y, pull = jax.vjp(jax.jit(lambda x: plain(x, window, stride, padding)), x)
    mine, pull_mine = jax.vjp(jax.jit(lambda x: max_pool(x, window, stride, padding)), x)
    g = jax.random.normal(keys[1], y.shape)
    assert mine.tolist() == y.tolist()
    np.testing.assert_allclose(pull_mine(g)[0], pull(g)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_overlapping_windows_are_added_in_float32(dtype):
    """The pixel in the middle is the largest of four windows, whose gradients are 1 and three times half its last bit.

    Added in the dtype, each half of a bit would be lost.
    """
    half = float(jnp.finfo(dtype).eps) / 2
    x = jnp.zeros((1, 3, 3, 1), dtype).at[0, 1, 1, 0].set(1)
    y, pull = jax.vjp(lambda x: max_pool(x, 2, 1), x)
    (grad,) = pull(jnp.array([1, half, half, half], dtype).reshape(y.shape))
    assert grad.dtype == dtype
    assert float(grad[0, 1, 1, 0]) == 1 + 4 * half


def test_a_nan_is_the_largest():
    x = jnp.zeros((1, 4, 4, 1)).at[0, 1, 1, 0].set(jnp.nan)
    assert np.isnan(max_pool(x, 2, 2)[0, :, :, 0]).tolist() == [[True, False], [False, False]]


def test_the_gradient_is_no_scatter():
    x = jnp.zeros((1, 4, 4, 1), jnp.bfloat16)
    program = (
        jax.jit(jax.grad(lambda x: jnp.sum(max_pool(x, 3, 2, ((1, 1), (1, 1))).astype(jnp.float32)))).lower(x).as_text()
    )
    assert "pad" in program
    assert "scatter" not in program
