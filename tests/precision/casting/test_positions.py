"""Positions times frequencies stay in float32: half precision cannot count as far as positions go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax


POSITIONS = np.arange(2000)
FREQUENCIES = (10_000.0 ** -(np.arange(8) / 8)).astype(np.float32)
CLOSED_OVER = jnp.asarray(FREQUENCIES)
X = jnp.ones((4, 4))


def iota():
    return jnp.arange(2000, dtype=jnp.float32)


ANGLES = {
    "einsum": lambda p, f: jnp.einsum("i,j->ij", p.astype(jnp.float32), f),
    "batched einsum": lambda p, f: jnp.einsum("bi,j->bij", p[None].astype(jnp.float32), f),
    "tensordot": lambda p, f: jnp.tensordot(p.astype(jnp.float32), f, axes=0),
    "a product over one": lambda p, f: p.astype(jnp.float32)[:, None] @ f[None],
    "batches over one": lambda p, f: f[None, :, None] @ p[None, None].astype(jnp.float32),
    "iota": lambda p, f: jnp.einsum("i,j->ij", iota(), f),
    "iota and an array of NumPy": lambda p, f: jnp.einsum("i,j->ij", iota(), FREQUENCIES),
    "an array that is closed over": lambda p, f: jnp.einsum("i,j->ij", p.astype(jnp.float32), CLOSED_OVER),
    "three coordinates": lambda p, f: (
        jnp.stack([p, 2 * p, 3 * p], -1).astype(jnp.float32) @ jnp.stack([CLOSED_OVER] * 3)
    ),
    "frequencies of the program": lambda p, f: jnp.einsum("i,j->ij", iota(), 10_000 ** -(jnp.arange(8.0) / 8)),
    "inside of jit": lambda p, f: jax.jit(lambda p: p.astype(jnp.float32)[:, None] @ f[None])(p),
    "in a loop": lambda p, f: jax.lax.map(lambda i: jnp.einsum("i,j->ij", i[None].astype(jnp.float32), CLOSED_OVER), p),
}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ANGLES)
def test_angles_have_every_bit_of_float32(name, policy):
    found = jax.jit(mpjax.autocast(ANGLES[name], policy))(POSITIONS, FREQUENCIES)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, jax.jit(ANGLES[name])(POSITIONS, FREQUENCIES))


@pytest.mark.parametrize(
    "fn",
    [
        lambda images, x: images.astype(jnp.float32) / 255 @ x,
        lambda images, x: jax.nn.one_hot(images[0], 4) @ x,
        lambda images, x: x[:, :1] @ x[:1],
        lambda images, x: (images.astype(jnp.float32) @ jnp.ones((4, 4)) + x) @ x,
        lambda images, x: (images.astype(jnp.float32) @ CLOSED_OVER.reshape(4, 2)) @ CLOSED_OVER.reshape(2, 4),
    ],
    ids=["images", "one-hot", "over one", "after a product", "a model that is closed over"],
)
def test_other_products_stay_in_half_precision(fn):
    assert mpjax.autocast(fn, "mixed_float16")(jnp.ones((4, 4), jnp.uint8), X).dtype == jnp.float16
