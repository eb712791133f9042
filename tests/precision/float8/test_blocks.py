"""Products in blocks under `jax.vmap`, as a CUDA device gets them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision.float8 import (
    E4M3,
    MXFP8,
    ScaledFloat8,
    multiplied_in_blocks,
    multiplied_on_cuda,
    product,
    quantise_blocks,
)


FLOAT32 = np.dtype("float32")


def scaled_matmul(a, b, a_scales, b_scales, preferred_element_type):
    """Does on any device what `jax.nn.scaled_matmul` does, and takes three axes alone."""
    assert a.ndim == b.ndim == a_scales.ndim == b_scales.ndim == 3
    x, w = (v.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), 32, 2) for v, s in ((a, a_scales), (b, b_scales)))
    return jnp.einsum("bmk,bnk->bmn", x, w).astype(preferred_element_type)


def random(rows, *axes):
    """Returns matrices of some rows, with a batch of 3 and one of 4 along the given axes, None for no batch."""
    sizes = [size for size, axis in zip((3, 4), axes, strict=True) if axis is not None]
    x = jax.random.normal(jax.random.key(rows), (*sizes, rows, 64))
    return x if axes[0] is None else jnp.moveaxis(x, 0, axes[0])


@pytest.mark.slow
@pytest.mark.parametrize("outer", [(0, 0), (0, None), (1, 0), (None, 1)])
@pytest.mark.parametrize("inner", [(0, 0), (None, 0)])
def test_batches_of_batches_are_multiplied_as_one_by_one(monkeypatch, outer, inner):
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)

    def of(multiply):
        def one(a, b):
            return multiply(quantise_blocks(a, E4M3), quantise_blocks(b, E4M3), FLOAT32)

        return jax.vmap(jax.vmap(one, inner), outer)

    a, b = random(5, outer[0], inner[0]), random(2, outer[1], inner[1])
    found = of(multiplied_on_cuda)(a, b)
    assert found.shape == (3, 4, 5, 2)
    np.testing.assert_allclose(found, of(multiplied_in_blocks)(a, b), rtol=1e-6, atol=1e-5)


@pytest.mark.slow
def test_the_scales_alone_may_have_a_batch(monkeypatch):
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    a, b = (quantise_blocks(random(rows, None, None), E4M3) for rows in (5, 2))
    found = jax.vmap(lambda k: multiplied_on_cuda(ScaledFloat8(a.values, a.inverse * k), b, FLOAT32))(
        jnp.array([1.0, 4.0])
    )
    np.testing.assert_array_equal(found[1], 4 * found[0])


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_a_batch_of_products_and_of_their_gradients_is_lowered_for_cuda(axes):
    x, w = jnp.ones((3, 32, 64)), jnp.ones((3, 64, 32))
    given = (x if axes[0] == 0 else x[0], w if axes[1] == 0 else w[0])

    def loss(x, w):
        return jnp.sum(product(x, w, MXFP8, FLOAT32))

    traced = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), axes)).trace(*given)
    assert "scaled" in traced.lower(lowering_platforms=("cuda",)).as_text()
