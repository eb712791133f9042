"""The noise of formats that a step does not use."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.diagnosis import noise_in_blocks, program_of_function, program_of_model
from mpjax.precision import get_policy


X = jax.random.normal(jax.random.key(0), (4, 64))


class Two(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Dict(linear=nnx.Linear(64, 64, rngs=rngs)) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer["linear"](x))
        return x


def test_products_in_float8_have_noise_in_blocks():
    policy = get_policy("mixed_float8")
    loss = lambda model, x: jnp.mean(jnp.square(model(x).astype(jnp.float32)))  # noqa: E731
    found = noise_in_blocks(program_of_model(Two(nnx.Rngs(0)), loss, X, policy))
    assert sorted(found) == ["layers/0/linear", "layers/1/linear"]
    for noise in found.values():
        assert noise["mxfp8"] == pytest.approx(31.5, abs=1)
        assert noise["nvfp4"] == pytest.approx(20, abs=2)


@pytest.mark.slow
def test_a_product_in_a_loop_is_left_out():
    def loss(params, x):
        def layer(x, kernel):
            with jax.named_scope("layer"):
                return jnp.tanh(x @ kernel).astype(x.dtype), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)))

    kernels = jax.random.normal(jax.random.key(1), (2, 64, 64)) / 8
    assert noise_in_blocks(program_of_function(loss, kernels, X, get_policy("mixed_float8"))) == {}
