"""A Whisper: what its config.json says, its blocks as one loop, texts with a cache, and what it refuses."""

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
from mpjax.data import Label, Tokens
from mpjax.data.audio import Sound
from mpjax.errors import UsageError
from mpjax.models import apart, apply_remat, stacks_of
from mpjax.models.generation import generate
from mpjax.models.whisper import (
    Whisper,
    WhisperSettings,
    export_whisper,
    load_whisper,
    read_settings,
    settings_of,
    split_whisper,
)
from mpjax.precision import name_scopes
from mpjax.training import take_apart


FOLDER = pathlib.Path(__file__).with_name("tiny")
TINY = json.loads((FOLDER / "config.json").read_text())
LARGE = TINY | {
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "num_hidden_layers": 32,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 128,
    "vocab_size": 51866,
    "apply_spec_augment": False,
    "mask_time_prob": 0.05,
    "scale_embedding": False,
    "torch_dtype": "float16",
}


def test_a_published_file_is_a_model_of_its_published_size():
    model = nnx.eval_shape(lambda: Whisper(settings_of(LARGE), rngs=nnx.Rngs(0)))
    _, params, stats = take_apart(model)
    assert sum(x.size for x in params.values()) == 1_541_570_560
    assert {path: x.shape for path, x in stats.items()} == {"encoder/positions": (1500, 1280)}  # sines, not trained


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "wav2vec2"}, 'model_type is "wav2vec2": wanted whisper'),
        (
            {"architectures": ["WhisperModel"]},
            "wanted WhisperForConditionalGeneration or WhisperForAudioClassification",
        ),
        ({"activation_function": "relu"}, 'the Whisper of mpjax has "gelu" only'),
        ({"apply_spec_augment": True}, "apply_spec_augment is true"),
        ({"scale_embedding": True}, "scale_embedding is true"),
        ({"use_weighted_layer_sum": True}, "use_weighted_layer_sum is true"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop is 0.1"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3: encoder_layers is 2"),
        ({"decoder_attention_heads": 5}, "decoder_attention_heads is 5: wanted a divisor of d_model 32"),
        ({"decoder_start_token_id": 260}, "decoder_start_token_id is 260: wanted a token below 260"),
        ({"layer_norm_eps": 1e-3}, "does not know layer_norm_eps 0.001"),
    ],
)
def test_what_is_not_understood_is_an_error(change, says):
    with pytest.raises(UsageError, match=says):
        settings_of(TINY | change)


SETTINGS = WhisperSettings(
    vocabulary=40,
    bins=4,
    width=16,
    encoder_depth=2,
    encoder_heads=2,
    encoder_hidden=24,
    decoder_depth=3,
    decoder_heads=2,
    decoder_hidden=24,
    positions=6,
    length=10,
    start=2,
    projected=5,
)
SOUNDS = jax.random.normal(jax.random.key(0), (2, 12, 4))
TARGETS = jax.random.randint(jax.random.key(1), (2, 7), 3, 40)


@nnx.jit
def logits(model, *inputs):
    return model(*inputs)


def test_later_targets_change_nothing():
    model = Whisper(SETTINGS, rngs=nnx.Rngs(0))
    before, other = (logits(model, SOUNDS, targets) for targets in (TARGETS, TARGETS.at[:, 4].set(5)))
    assert np.array_equal(before[:, :5], other[:, :5])
    assert not np.array_equal(before[:, 5], other[:, 5])
    with pytest.raises(UsageError, match="sounds of 10 frames: wanted 12, two for each position"):
        model(SOUNDS[:, :10], TARGETS)
    with pytest.raises(UsageError, match="texts of 11 tokens, but the model takes at most 10"):
        model(SOUNDS, jnp.zeros((2, 11), jnp.int32))


def loss_and_gradients(*, scan=False, remat="none"):
    model = Whisper(SETTINGS, scan_blocks=scan, rngs=nnx.Rngs(0))
    name_scopes(model)
    mpjax.apply_policy(model, "float32")
    apply_remat(model, remat)
    structure, params, stats = take_apart(model)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return jnp.mean(jnp.square(structure.assemble(params, stats)(SOUNDS, TARGETS)))

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
    assert "encoder/positions" not in grads
    for path, expected in plain[1].items():
        np.testing.assert_allclose(grads[path], expected, atol=1e-6 * float(jnp.max(jnp.abs(expected))) + 1e-9)


@pytest.mark.parametrize("scan", [False, True])
def test_texts_are_those_that_whole_passes_write(scan):
    """Token by token without a cache, of two sounds at once and of one alone; behind a prompt, without some tokens."""
    model = Whisper(SETTINGS, scan_blocks=scan, rngs=nnx.Rngs(0))

    def by_whole_passes(prompt, never, not_first):
        written = jnp.zeros((2, 8), jnp.int32).at[:, : len(prompt)].set(jnp.asarray(prompt, jnp.int32))
        for place in range(len(prompt), 8):
            out = logits(model, SOUNDS, written)[:, place]
            out = out.at[:, jnp.asarray([*never, *(not_first if place == len(prompt) else ())], jnp.int32)].set(
                -jnp.inf
            )
            written = written.at[:, place].set(jnp.argmax(out, axis=-1))
        return written[:, len(prompt) :].tolist()

    sounds = [np.asarray(sound) for sound in SOUNDS]
    free = by_whole_passes((), (), ())
    both = generate(split_whisper(model), sounds, max_tokens=8)
    assert [found.tokens.tolist() for found in both] == free
    (alone,) = generate(split_whisper(model), sounds[:1], max_tokens=8)
    assert alone.tokens.tolist() == free[0]
    first = free[0][0]
    never = by_whole_passes((7, 9), (), ())[0][1]
    parts = split_whisper(model, prompt=(7, 9), suppressed=(never,), suppressed_first=(first,))
    forced = generate(parts, sounds, max_tokens=6)
    assert [found.tokens.tolist() for found in forced] == by_whole_passes((7, 9), (never,), (first,))
    (longest,) = generate(parts, sounds[:1], max_tokens=99)
    assert (len(longest.tokens), longest.stopped) == (7, "length")  # of 10, with the first one and the prompt


def test_what_cannot_be_written_is_an_error():
    model = Whisper(SETTINGS, rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match="suppressed tokens: 40, and the model knows 0 to 39"):
        split_whisper(model, suppressed=(40,))
    with pytest.raises(UsageError, match="a prompt of 10 tokens leaves no room"):
        split_whisper(model, prompt=range(9))
    with pytest.raises(UsageError, match=r"prompt 0 is int64\[2\]: wanted log-mel features"):
        generate(split_whisper(model), [[1, 2]])


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_rule_for_the_first_layer_keeps_every_bit_of_the_features(policy):
    models = [Whisper(SETTINGS, rngs=nnx.Rngs(0)) for _ in range(2)]
    mpjax.apply_policy(models[1], mpjax.Policy("float32", policy, rules={"encoder/conv1": "float32"}))
    wide, half = (model.encoder.conv1(SOUNDS) for model in models)
    assert half.dtype == wide.dtype == jnp.float32
    assert np.array_equal(wide, half)


def test_a_folder_is_loaded_exported_and_refused(tmp_path):
    from mpjax.models.pretrained import export_safetensors

    (tmp_path / "in").mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / "in" / name).write_bytes((FOLDER / name).read_bytes())
    model = Whisper(read_settings(FOLDER), rngs=nnx.Rngs(0))
    model.encoder.positions[...] += 1e-3  # of the file, whatever the sines are
    export_safetensors(model, tmp_path / "in" / "model.safetensors", layout="huggingface")
    loaded = load_whisper(tmp_path / "in", policy="mixed_bfloat16", scan_blocks=True)
    assert stacks_of(loaded) == {"encoder/blocks": 2, "decoder/blocks": 2}
    export_whisper(loaded, tmp_path / "out", source=tmp_path / "in")
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    again = load_whisper(tmp_path / "out")
    for (path, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(x)) for x in (model, again)), strict=True):
        assert np.array_equal(a[...], b[...]), path
    other = Whisper(SETTINGS, rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match="has other settings than the model"):
        export_whisper(other, tmp_path / "other", source=FOLDER)


def test_other_data_is_refused():
    def build(fields):
        return models.build_model(Model(name=f"hf:{FOLDER}"), fields=fields, rngs=nnx.Rngs(0))

    sound, targets = {"sound": Sound(100, 80)}, {"target_tokens": Tokens(24, 260)}
    assert build(sound | targets).settings == read_settings(FOLDER)
    assert build(sound | {"label": Label(3)}).head.kernel.shape == (12, 3)
    with pytest.raises(UsageError, match="is for transcription: it takes sound, target_tokens"):
        build(targets)
    with pytest.raises(
        UsageError, match=r"hears 100 frames of 80 mel bins, and the data has 3000 of 128: write --data.f"
    ):
        build({"sound": Sound(3000, 128)} | targets)
    with pytest.raises(UsageError, match="takes texts of at most 24 tokens, and the data has texts of 25"):
        build(sound | {"target_tokens": Tokens(25, 260)})
