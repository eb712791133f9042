"""BERT as published: its size, and what padding and segments do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import BERT, bert_base


@pytest.fixture(scope="module")
def model():
    @nnx.jit
    def made():
        return BERT(vocabulary=20, length=8, num_classes=3, width=16, depth=2, heads=2, rngs=nnx.Rngs(0))

    model = made()
    model.eval()
    return jax.jit(model)


TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 20)


@pytest.mark.slow
def test_parameter_count_without_the_classifier():
    model = nnx.eval_shape(lambda: bert_base(num_classes=2, rngs=nnx.Rngs(0)))
    del model.head
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == 109_482_240


@pytest.mark.slow
def test_texts_give_logits(model):
    assert model(TOKENS).shape == (2, 3)


@pytest.mark.slow
def test_padding_changes_nothing(model):
    lengths = jnp.array([4, 6], jnp.int32)
    padded = TOKENS.at[0, 4:].set(0)
    np.testing.assert_array_equal(model(padded, lengths), model(TOKENS, lengths))
    np.testing.assert_allclose(model(TOKENS[:1, :4]), model(TOKENS, lengths)[:1], atol=1e-6)


@pytest.mark.slow
def test_without_segments_all_is_the_first(model):
    zeros, ones = jnp.zeros_like(TOKENS), jnp.ones_like(TOKENS)
    np.testing.assert_array_equal(model(TOKENS), model(TOKENS, None, zeros))
    assert not np.allclose(model(TOKENS), model(TOKENS, None, ones))


def test_the_order_of_words_matters(model):
    assert not np.allclose(model(TOKENS), model(TOKENS.at[:, 1:].set(TOKENS[:, :0:-1])), atol=1e-6)


def test_a_text_too_long_is_an_error(model):
    with pytest.raises(UsageError, match="texts of 9 tokens, but the model takes at most 8"):
        model(jnp.zeros((1, 9), jnp.int32))
