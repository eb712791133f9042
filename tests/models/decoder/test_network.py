"""The decoder: what a prediction sees, and what each setting changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import LayerKind, Rope
from mpjax.models.decoder import Decoder, DecoderSettings, RMSNorm


TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, 20)
CHANGED = TOKENS.at[:, 4].set((TOKENS[:, 4] + 1) % 20)


@nnx.jit
def logits(model, tokens, lengths=None):
    return model(tokens, lengths)


def moved(model, tokens=CHANGED, lengths=None):
    """The positions of the first text whose logits another token 4 changes."""
    before, after = logits(model, TOKENS, lengths), logits(model, tokens, lengths)
    return np.flatnonzero(np.any(np.asarray(before != after), axis=(0, 2))).tolist()


def test_a_prediction_sees_what_is_before_it_only(llama):
    model = Decoder(llama, rngs=nnx.Rngs(0))
    assert logits(model, TOKENS).shape == (2, 8, 20)
    assert moved(model) == [4, 5, 6, 7]


def test_a_window_hides_what_is_further_back(llama):
    layers = (LayerKind(window=2),)
    model = Decoder(dataclasses.replace(llama, layers=layers), rngs=nnx.Rngs(0))
    assert moved(model) == [4, 5]


def test_every_layer_has_its_own_window(llama):
    """Two layers of two positions each see three."""
    layers = (LayerKind(window=2), LayerKind(window=2))
    assert moved(Decoder(dataclasses.replace(llama, layers=layers), rngs=nnx.Rngs(0))) == [4, 5, 6]
    layers = (LayerKind(window=2), LayerKind(window=1))
    assert moved(Decoder(dataclasses.replace(llama, layers=layers), rngs=nnx.Rngs(0))) == [4, 5]


def test_padding_behind_the_length_changes_nothing(gemma):
    model = Decoder(gemma, rngs=nnx.Rngs(0))
    lengths = jnp.array([4, 6], jnp.int32)
    other = TOKENS.at[0, 4:].set((TOKENS[0, 4:] + 1) % 20)
    before, after, alone = (
        logits(model, tokens, lengths)[0, :4] for tokens in (TOKENS, other, TOKENS.at[0, 4:].set(0))
    )
    assert np.array_equal(before, after)
    assert np.array_equal(before, alone)
    np.testing.assert_allclose(before, logits(model, TOKENS[:1, :4])[0], atol=1e-6)


def test_only_differences_of_positions_count(llama):
    """The last of three equal texts, one behind the other, is far from the first and sees only itself."""
    model = Decoder(dataclasses.replace(llama, layers=(LayerKind(window=2),)), rngs=nnx.Rngs(0))
    twice = jnp.concatenate([TOKENS[:, :4], TOKENS[:, :4]], axis=1)
    out = logits(model, twice)
    np.testing.assert_allclose(out[:, 5:], out[:, 1:4], atol=1e-5)


def test_positions_change_predictions_and_layers_without_them_see_no_order(llama):
    """The last token sees the same tokens before it, in another order."""
    other = TOKENS[:, jnp.array([1, 0, 2, 3, 4, 5, 6, 7])]
    for rope, same in ((None, True), (Rope(), False)):
        model = Decoder(dataclasses.replace(llama, layers=(LayerKind(rope=rope),)), rngs=nnx.Rngs(0))
        first, second = (logits(model, tokens)[:, -1] for tokens in (TOKENS, other))
        assert np.allclose(first, second, atol=1e-7) == same


def test_logits_are_capped(gemma):
    model = Decoder(gemma, rngs=nnx.Rngs(0))
    plain = Decoder(dataclasses.replace(gemma, logit_cap=None), rngs=nnx.Rngs(0))
    raw = np.asarray(logits(plain, TOKENS))
    np.testing.assert_allclose(logits(model, TOKENS), 3.0 * np.tanh(raw / 3.0), atol=1e-6)


def test_features_and_logits_are_the_two_parts_of_a_call(gemma):
    """As `--training.chunked_loss` calls them."""
    model = Decoder(gemma, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(model.logits(model.features(TOKENS)), logits(model, TOKENS), atol=1e-5)


def test_the_scale_of_a_norm_may_be_a_difference_from_one():
    x = jax.random.normal(jax.random.key(0), (2, 4))
    expected = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.5)
    for offset, initial in ((0.0, 1.0), (1.0, 0.0)):
        norm = RMSNorm(4, epsilon=0.5, offset=offset, rngs=nnx.Rngs(0))
        assert norm.scale[...].tolist() == [initial] * 4
        np.testing.assert_allclose(norm(x), expected, rtol=1e-6)


@pytest.mark.parametrize("value", [60_000.0, 1e-4])
def test_the_mean_square_of_a_norm_is_in_float32(value):
    """In float16, the squares would be inf and 0."""
    norm = RMSNorm(4, epsilon=1e-12, offset=0.0, rngs=nnx.Rngs(0))
    y = norm(jnp.full((1, 4), value, jnp.float16))
    assert (y.dtype, y.tolist()) == (jnp.float16, [[1.0] * 4])


def test_a_text_too_long_is_an_error(llama):
    with pytest.raises(UsageError, match="texts of 17 tokens, but the model takes at most 16"):
        nnx.eval_shape(lambda: Decoder(llama, rngs=nnx.Rngs(0))(jnp.zeros((1, 17), jnp.int32)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key_heads": 3}, "4 heads cannot have 3 key and value heads: wanted a divisor of 4"),
        ({"head_features": 5}, "5 features cannot be rotated: wanted an even number"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(llama, change, says):
    with pytest.raises(UsageError, match=says):
        DecoderSettings(**(dataclasses.asdict(llama) | {"layers": llama.layers} | change))
