"""A Whisper gives the logits and gradients of Hugging Face transformers on its weights, and gives these back."""

import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.models.generation import generate
from mpjax.models.whisper import (
    Whisper,
    WhisperClassifier,
    export_whisper,
    load_whisper,
    read_settings,
    split_whisper,
)


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

SIZES = {
    "vocab_size": 50,
    "d_model": 32,
    "num_mel_bins": 8,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_source_positions": 20,
    "max_target_positions": 12,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "classifier_proj_size": 12,
    "num_labels": 5,
}
drawn = np.random.default_rng(0)
SOUNDS = drawn.normal(size=(3, 40, 8)).astype(np.float32)
TARGETS = drawn.integers(3, 50, (3, 12))
INPUTS = jnp.asarray(SOUNDS), jnp.asarray(TARGETS, jnp.int32)


class Saved(NamedTuple):
    """A model of transformers with random weights, and the folder that it is saved in."""

    theirs: torch.nn.Module
    folder: str

    def logits(self) -> torch.Tensor:
        sounds = torch.tensor(SOUNDS).transpose(1, 2)
        if not hasattr(self.theirs, "model"):
            return self.theirs(sounds).logits
        read = torch.cat([torch.full((3, 1), 2), torch.tensor(TARGETS)[:, :-1]], dim=1)
        return self.theirs(sounds, decoder_input_ids=read).logits


def made(kind, folder):
    torch.manual_seed(0)
    theirs = getattr(transformers, f"WhisperFor{kind}")(transformers.WhisperConfig(**SIZES))
    for name, value in theirs.named_parameters():
        # No ones, which would hide a scale that went to another place; sines stay.
        if "encoder.embed_positions" not in name:
            scale = "norm" in name and "weight" in name
            torch.nn.init.normal_(value, 1.0 if scale else 0.0, 0.2 if scale else 0.2 if "bias" in name else 0.1)
    theirs.save_pretrained(folder)
    return Saved(theirs.eval(), str(folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return made("ConditionalGeneration", tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return made("AudioClassification", tmp_path_factory.mktemp("classifier"))


@nnx.jit
def logits(model, *inputs):
    return model(*inputs)


def loaded(saved: Saved, **options) -> nnx.Module:
    model = load_whisper(saved.folder, **options)
    model.eval()
    return model


def of_classes(saved: Saved) -> WhisperClassifier:
    model = WhisperClassifier(read_settings(pathlib.Path(saved.folder)), num_classes=5, rngs=nnx.Rngs(1))
    mpjax.load_pretrained(model, saved.folder)
    return model


def test_logits_in_float32_are_theirs(saved):
    with torch.no_grad():
        expected = saved.logits().numpy()
    assert np.max(np.abs(expected)) > 0.4
    for scan in (False, True):
        actual = np.asarray(logits(loaded(saved, scan_blocks=scan), *INPUTS))
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_logits_of_classes_are_theirs(classifier):
    with torch.no_grad():
        expected = classifier.logits().numpy()
    np.testing.assert_allclose(np.asarray(logits(of_classes(classifier), INPUTS[0])), expected, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "O1", "bfloat16"])
def test_logits_in_half_precision_are_near_and_float32(saved, policy):
    with torch.no_grad():
        exact = saved.logits().numpy()
    call = logits
    if policy == "O1":
        model, call = loaded(saved), mpjax.autocast(lambda model, *inputs: model(*inputs), policy="O1")
    else:
        model = loaded(saved, policy=policy)
    actual = call(model, *INPUTS)
    assert actual.dtype == ("float16" if policy == "O1" else "float32")  # a product, which losses widen
    assert 0 < np.max(np.abs(np.asarray(actual) - exact)) < 0.1 * np.max(np.abs(exact))


def test_gradients_are_theirs(saved, tmp_path):
    saved.theirs.zero_grad()
    aim = torch.tensor(np.random.default_rng(1).normal(size=(3, 12, 50))).float()
    (saved.logits() * aim).sum().backward()
    named = dict(saved.theirs.named_parameters())
    untrained = [name for name, value in named.items() if value.grad is None]
    assert untrained == ["model.encoder.embed_positions.weight"]
    gradients = {name: value.grad.numpy() for name, value in named.items() if name not in untrained}
    save_file(gradients, tmp_path / "gradients.safetensors")
    expected = Whisper(read_settings(pathlib.Path(saved.folder)), rngs=nnx.Rngs(0))
    mpjax.load_pretrained(expected, tmp_path / "gradients.safetensors", skip=["encoder/positions"])

    def loss(model, *inputs):
        return jnp.sum(model(*inputs) * jnp.asarray(aim.numpy()))

    actual = nnx.jit(nnx.grad(loss))(loaded(saved), *INPUTS)
    pairs = zip(nnx.to_flat_state(actual), nnx.to_flat_state(nnx.state(expected, nnx.Param)), strict=True)
    for (path, a), (_, b) in pairs:
        ours, theirs = np.array(a[...]), np.array(b[...])
        largest = np.max(np.abs(theirs))
        # No gradient reaches the keys through a softmax over one key, and the last position reads what no other does.
        assert largest > 0, path
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(largest, 1e-2), err_msg=str(path))


def test_an_export_is_their_file_and_they_load_it(saved, classifier, tmp_path):
    for kind, model, of in (
        ("Seq2Seq", load_whisper(saved.folder), saved),
        ("Classes", of_classes(classifier), classifier),
    ):
        out = str(tmp_path / kind)
        export_whisper(model, out, source=of.folder)
        theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (of.folder, out))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
        again = type(of.theirs).from_pretrained(out).eval()
        with torch.no_grad():
            assert torch.equal(of._replace(theirs=again).logits(), of.logits())


def test_a_classifier_begins_with_the_encoder_of_a_whisper(saved):
    model = WhisperClassifier(read_settings(pathlib.Path(saved.folder)), num_classes=5, rngs=nnx.Rngs(1))
    mpjax.load_pretrained(model, saved.folder, skip=["projector/*", "head/*"])
    theirs = saved.theirs.model.encoder.layers[1].fc1.weight.detach().numpy().T
    assert np.array_equal(np.asarray(model.encoder.blocks[1].mlp.up.kernel[...]), theirs)


def test_texts_of_greedy_decoding_are_theirs(saved):
    """Behind a forced prompt, without suppressed tokens; of three sounds at once."""
    parts = split_whisper(load_whisper(saved.folder), prompt=(7, 9), suppressed=(4, 11), suppressed_first=(5,))
    ours = generate(parts, list(SOUNDS), max_tokens=9)
    with torch.no_grad():
        written = torch.tensor([[2, 7, 9]] * 3)
        for place in range(9):
            logits = saved.theirs(torch.tensor(SOUNDS).transpose(1, 2), decoder_input_ids=written).logits[:, -1]
            logits[:, [4, 11, *([5] if place == 0 else [])]] = -torch.inf
            written = torch.cat([written, logits.argmax(-1, keepdim=True)], dim=1)
    assert [found.tokens.tolist() for found in ours] == written[:, 3:].tolist()
