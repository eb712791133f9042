"""GPT-2 as published: its size, what a prediction sees, tied embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import GPT2, gpt2_small
from mpjax.precision import apply_policy
from mpjax.precision.casting import equations


@pytest.fixture
def model():
    make = nnx.jit(lambda: GPT2(vocabulary=20, length=8, width=16, depth=2, heads=2, rngs=nnx.Rngs(0)))
    model = make()
    model.eval()
    return model


TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 20)


def test_parameter_count():
    model = nnx.eval_shape(lambda: gpt2_small(rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == 124_439_808


@pytest.mark.slow
def test_a_prediction_sees_what_is_before_it_only(model):
    before, after = model(TOKENS), model(TOKENS.at[:, 4].set((TOKENS[:, 4] + 1) % 20))
    assert before.shape == (2, 6, 20)
    assert np.array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 4:], after[:, 4:], atol=1e-6)


def test_logits_are_products_with_the_embeddings_of_tokens(model):
    logits = nnx.jit(lambda model, tokens: model(tokens))
    # No text has token 19 behind this change, so that only the logits can see its embedding.
    tokens = jnp.where(TOKENS == 19, 0, TOKENS)
    before = logits(model, tokens)
    model.tokens.embedding[...] = model.tokens.embedding[...].at[19].multiply(2.0)
    after = logits(model, tokens)
    np.testing.assert_allclose(after[..., 19], 2 * before[..., 19], rtol=1e-5)
    assert np.array_equal(after[..., :19], before[..., :19])


@pytest.mark.parametrize(
    ("policy", "output"), [("mixed_float16", jnp.float32), pytest.param("O3", jnp.float16, marks=pytest.mark.slow)]
)
def test_logits_are_products_in_half_precision_that_leave_in_the_output_dtype(model, policy, output):
    apply_policy(model, policy)
    with jax.numpy_dtype_promotion("standard"):  # O3's norm, which is Flax's, has a float32 epsilon
        traced = jax.make_jaxpr(model)(TOKENS)
    products = [eqn for _, eqn in equations(traced) if eqn.primitive.name == "dot_general"]
    (logits,) = [eqn for eqn in products if eqn.outvars[0].aval.shape == (2, 6, 20)]
    assert [atom.aval.dtype for atom in (*logits.invars, *logits.outvars)] == [jnp.float16, jnp.float16, output]


@pytest.mark.slow
def test_what_is_added_to_the_shortcut_starts_smaller_the_deeper_the_network():
    model = GPT2(vocabulary=20, length=8, width=128, depth=8, heads=2, rngs=nnx.Rngs(0))
    down, up = (float(jnp.std(getattr(model.blocks[3].mlp, name).kernel[...])) for name in ("down", "up"))
    assert (down, up) == (pytest.approx(0.005, rel=0.02), pytest.approx(0.02, rel=0.02))


def test_a_text_too_long_is_an_error(model):
    with pytest.raises(UsageError, match="texts of 9 tokens, but the model takes at most 8"):
        model(jnp.zeros((1, 9), jnp.int32))
