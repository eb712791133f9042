"""A T5: what its config.json says, what a token sees, its blocks as one loop, and targets with a cache."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax import models
from mpjax.config import Model
from mpjax.data import Length, Tokens
from mpjax.errors import UsageError
from mpjax.models import apart, apply_remat, stacks_of
from mpjax.models.generation import Sampling, generate
from mpjax.models.pretrained import export_safetensors
from mpjax.models.t5 import T5, export_t5, load_t5, read_settings, settings_of, split_t5
from mpjax.precision import name_scopes
from mpjax.training import take_apart


FOLDER = pathlib.Path(__file__).with_name("tiny")
TINY = json.loads((FOLDER / "config.json").read_text())
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SMALL = {
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "feed_forward_proj": "relu",
    "is_encoder_decoder": True,
    "model_type": "t5",
    "num_decoder_layers": 6,
    "num_heads": 8,
    "num_layers": 6,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"max_length": 200}},
    "vocab_size": 32128,
}
FLAN = SMALL | GATED | {"d_ff": 1024, "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8}


@pytest.mark.parametrize(
    ("config", "expected"), [(SMALL, 60_506_624), (FLAN, 76_961_152)], ids=["t5-small", "flan-t5-small"]
)
def test_published_files_are_models_of_their_published_size(config, expected):
    model = nnx.eval_shape(lambda: T5(settings_of(config), rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == expected


def test_logits_are_scaled_and_tied_as_files_of_old_and_new_transformers_say():
    def kind(config, **options):
        settings = settings_of(config, **options)
        return settings.scaled, settings.tied

    new = TINY | GATED | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert kind(TINY) == (True, True)
    assert kind(TINY | GATED) == (False, False)
    assert (kind(new), kind(new, has_head=True)) == ((False, True), (False, False))
    assert kind(TINY, has_head=True) == (True, True)  # a copy of the embeddings, which is checked
    mt5 = TINY | GATED | {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
    assert kind(mt5) == (False, False)


def test_decoding_begins_with_the_padding_or_in_mt5_with_0():
    without = {key: value for key, value in (TINY | {"pad_token_id": 4}).items() if key != "decoder_start_token_id"}
    assert settings_of(without).start == 4
    mt5 = {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
    assert settings_of(without | GATED | mt5).start == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "umt5"}, 'model_type is "umt5": wanted t5 or mt5'),
        ({"architectures": ["T5EncoderModel"]}, "wanted T5ForConditionalGeneration"),
        ({"feed_forward_proj": "gelu"}, 'feed_forward_proj is "gelu": wanted relu or gated-gelu or gated-silu'),
        ({"dense_act_fn": "gelu_new"}, 'dense_act_fn is "gelu_new": the T5 of mpjax has "relu" only'),
        ({"is_gated_act": True}, "is_gated_act is true"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets is 2: wanted 4"),
        ({"relative_attention_max_distance": 4}, "relative_attention_max_distance is 4: wanted more than 4"),
        ({"decoder_start_token_id": 260}, "decoder_start_token_id is 260: wanted a token below 260"),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0"),
        ({"d_kv": 0}, "d_kv is 0: wanted at least 1"),
        ({"attention_scale": 2.0}, "does not know attention_scale 2.0"),
    ],
)
def test_what_is_not_understood_is_an_error(change, says):
    with pytest.raises(UsageError, match=says):
        settings_of(TINY | change)


SETTINGS = dataclasses.replace(
    settings_of(TINY | GATED), width=16, hidden=24, head_features=8, heads=2, decoder_depth=3
)
SOURCES = jax.random.randint(jax.random.key(0), (2, 9), 2, 260)
TARGETS = jax.random.randint(jax.random.key(1), (2, 7), 2, 260)
LENGTHS = jnp.asarray([4, 9])


@nnx.jit
def logits(model, *inputs):
    return model(*inputs)


def test_padding_and_later_targets_change_nothing():
    model = T5(SETTINGS, rngs=nnx.Rngs(0))
    before = logits(model, SOURCES, LENGTHS, TARGETS)
    other = logits(model, SOURCES.at[0, 4:].set(5), LENGTHS, TARGETS.at[:, 4].set(5))
    assert np.array_equal(before[:, :5], other[:, :5])
    assert not np.array_equal(before[:, 5], other[:, 5])
    np.testing.assert_allclose(before[0], logits(model, SOURCES[:1, :4], None, TARGETS[:1])[0], atol=1e-5)


def loss_and_gradients(*, scan=False, remat="none", policy="float32"):
    model = T5(SETTINGS, scan_blocks=scan, rngs=nnx.Rngs(0))
    name_scopes(model)
    mpjax.apply_policy(model, policy)
    apply_remat(model, remat)
    structure, params, _ = take_apart(model)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return jnp.mean(jnp.square(structure.assemble(params, {})(SOURCES, LENGTHS, TARGETS)))

    value, grads = loss(params)
    return float(value), apart(grads, stacks_of(model))


@pytest.fixture(scope="module")
def plain():
    return loss_and_gradients()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"scan": True}, {"remat": "full"}, {"scan": True, "remat": "dots"}], ids=str)
def test_a_loop_and_recomputed_activations_change_nothing(plain, options):
    value, grads = loss_and_gradients(**options)
    assert value == pytest.approx(plain[0], rel=1e-6)
    assert grads.keys() == plain[1].keys()
    for path, expected in plain[1].items():
        np.testing.assert_allclose(grads[path], expected, atol=1e-6 * float(jnp.max(jnp.abs(expected))) + 1e-9)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_the_bias_of_positions_and_the_sums_of_its_gradient_are_in_float32(policy):
    model = T5(SETTINGS, rngs=nnx.Rngs(0))
    mpjax.apply_policy(model, policy)
    positions = model.encoder.positions
    rows = 600  # each adds 1 to the gradient: above 256, a sum in bfloat16 stays where it is
    assert positions(jnp.arange(rows)[None], rows).dtype == jnp.float32

    @nnx.grad
    def slope(positions):
        return jnp.sum(positions(jnp.arange(rows)[None], rows))

    # Of 8 groups for distances up to 20, all at 20 tokens or more before are in the fourth.
    assert float(slope(positions).embedding[...][3, 0]) > 160_000


def test_dropout_is_in_training_alone():
    settings = dataclasses.replace(SETTINGS, dropout=0.1)
    model, without = T5(settings, rngs=nnx.Rngs(0)), T5(SETTINGS, rngs=nnx.Rngs(0))
    nnx.update(without, nnx.state(model, nnx.Param))
    expected = logits(without, SOURCES, LENGTHS, TARGETS)
    assert float(jnp.max(jnp.abs(logits(model, SOURCES, LENGTHS, TARGETS) - expected))) > 0.01
    model.eval()
    assert np.array_equal(logits(model, SOURCES, LENGTHS, TARGETS), expected)


@pytest.mark.parametrize("scan", [False, True])
def test_targets_are_those_that_whole_passes_write(scan):
    """Token by token without a cache, of two sources at once and of one alone."""
    model = T5(SETTINGS, scan_blocks=scan, rngs=nnx.Rngs(0))
    written = jnp.zeros((2, 6), jnp.int32)
    for place in range(6):
        drawn = jnp.argmax(logits(model, SOURCES, LENGTHS, written)[:, place], axis=-1)
        written = written.at[:, place].set(drawn)
    sources = [SOURCES[0, :4].tolist(), SOURCES[1].tolist()]
    both = generate(split_t5(model), sources, max_tokens=6)
    assert [found.tokens.tolist() for found in both] == written.tolist()
    (alone,) = generate(split_t5(model), sources[:1], max_tokens=6)
    assert alone.tokens.tolist() == written[0].tolist()
    drawn = generate(split_t5(model), sources, max_tokens=6, sampling=Sampling(temperature=2.0), seed=1)
    assert [found.tokens.tolist() for found in drawn] != written.tolist()


def test_a_folder_is_loaded_exported_and_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(TINY | GATED))
    model = T5(settings_of(TINY | GATED), rngs=nnx.Rngs(0))
    export_safetensors(model, tmp_path / "in" / "model.safetensors", layout="huggingface")
    loaded = load_t5(tmp_path / "in", policy="mixed_bfloat16", scan_blocks=True)
    assert stacks_of(loaded) == {"encoder/blocks": 2, "decoder/blocks": 2}
    export_t5(loaded, tmp_path / "out", source=tmp_path / "in")
    again = load_t5(tmp_path / "out")
    for (path, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(x, nnx.Param)) for x in (model, again)), strict=True):
        assert np.array_equal(a[...], b[...]), path
    with pytest.raises(UsageError, match="has other settings than the model"):
        export_t5(again, tmp_path / "other", source=FOLDER)


def test_other_data_is_refused():
    def build(fields):
        return models.build_model(Model(name=f"hf:{FOLDER}"), fields=fields, rngs=nnx.Rngs(0))

    texts = {"tokens": Tokens(8, 260), "length": Length(8)}
    targets = {"target_tokens": Tokens(8, 260), "target_length": Length(8)}
    assert build(texts | targets).settings == read_settings(FOLDER)
    with pytest.raises(UsageError, match="is for text_to_text: it takes tokens, length, target_tokens, target_length"):
        build(texts)
    with pytest.raises(UsageError, match="has 260 tokens, and the data 300: write --data.tokenizer"):
        build(texts | targets | {"tokens": Tokens(8, 300)})
