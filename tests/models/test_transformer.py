"""The block that all Transformers share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import Block, check_length, dropping, post_norm, pre_norm, with_positions
from mpjax.precision import apply_policy


X = jax.random.normal(jax.random.key(0), (2, 6, 16))


def block(**options):
    return nnx.jit(lambda: Block(16, 2, rngs=nnx.Rngs(0), **options))()


def test_norms_come_before_or_behind():
    def double(x):
        return 2 * x

    def plus_one(x):
        return x + 1

    assert pre_norm(5, double, plus_one) == 16
    assert post_norm(5, double, plus_one) == 22


def test_a_block_that_adds_nothing_is_its_shortcut_and_its_norms():
    zeros = nnx.initializers.zeros
    assert np.array_equal(jax.jit(block(out_init=zeros))(X), X)
    mean, variance = X.mean(-1, keepdims=True), X.var(-1, keepdims=True)
    expected = (X - mean) / jnp.sqrt(variance)
    np.testing.assert_allclose(jax.jit(block(order=post_norm, out_init=zeros))(X), expected, atol=1e-5)


def test_the_inner_layer_is_four_times_as_wide():
    model = block()
    assert (model.mlp.up.kernel.shape, model.mlp.down.kernel.shape) == ((16, 64), (64, 16))
    assert model.attention.query.kernel.shape == (16, 2, 8)
    assert model.attention.out.kernel.shape == (2, 8, 16)


def test_the_residual_stream_is_in_half_precision():
    model = block()
    apply_policy(model, "mixed_bfloat16")
    found = []

    def order(x, norm, change):
        found.extend([x.dtype, norm(x).dtype, change(norm(x)).dtype])
        return pre_norm(x, norm, change)

    model.order = order
    model(X.astype(jnp.bfloat16))
    assert found == [jnp.bfloat16] * 6


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_bias_that_is_cast_apart_gives_the_layers_own_numbers_and_gradients(policy, monkeypatch):
    """Bit for bit: its gradient is added in float32."""

    def found():
        mlp: Any = block().mlp
        mlp.down.bias[...] = jnp.linspace(-1, 1, 16)
        apply_policy(mlp, policy)
        x = jnp.tile(X, (50, 1, 1))
        return nnx.value_and_grad(lambda mlp: (mlp(x.astype(mlp.down.dtype)).astype(jnp.float32) * x).sum())(mlp)

    apart = found()
    monkeypatch.setattr("mpjax.models.transformer.with_cast_bias", lambda layer: layer)
    jax.tree.map(np.testing.assert_array_equal, apart, found())


def test_a_bias_is_cast_apart_in_half_precision_only():
    wide, half = block().mlp, block().mlp
    apply_policy(half, "mixed_bfloat16")
    assert [str(jax.make_jaxpr(mlp)(X)).count("optimization_barrier") for mlp in (wide, half)] == [0, 1]


def test_dropout_is_on_what_is_added_in_training_only():
    model = block(dropout=0.5)
    assert not np.array_equal(model(X), model(X))
    model.eval()
    assert np.array_equal(model(X), model(X))
    model.dropout.rate = 1.0
    model.train()
    assert np.array_equal(model(X), X)


def test_without_dropout_there_is_no_random_state():
    assert not jax.tree.leaves(nnx.state(block(), nnx.RngState))
    assert jax.tree.leaves(nnx.state(dropping(0.1, nnx.Rngs(0)), nnx.RngState))


def test_gradients_of_positions_add_up_in_float32():
    x = jnp.zeros((5001, 3, 4), jnp.float16)
    gradient = jax.grad(lambda table: jnp.sum(with_positions(x, table).astype(jnp.float32)))(jnp.zeros((8, 4)))
    # float16 has 5000 and 5004 and nothing between; rows that no token stands at get nothing.
    assert np.array_equal(gradient, np.array([5001.0] * 3 + [0.0] * 5)[:, None] * np.ones((1, 4)))


def test_a_text_too_long_is_an_error():
    check_length(jnp.zeros((1, 8), jnp.int32), 8)
    with pytest.raises(
        UsageError, match="texts of 9 tokens, but the model takes at most 8: cut them, or write length=9"
    ):
        check_length(jnp.zeros((1, 9), jnp.int32), 8)
