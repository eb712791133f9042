"""ViT, BERT and GPT-2 give the logits and gradients of Hugging Face transformers on its weights, and give them back."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.models import BERT, GPT2, ViT
from mpjax.models.pretrained import export_safetensors


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

RNG = np.random.default_rng(0)
EXAMPLES = 240  # rounding errors of a few say nothing of the next few
IMAGES = RNG.standard_normal((EXAMPLES, 8, 16, 3), np.float32)
TOKENS = RNG.integers(0, 20, (EXAMPLES, 8))
LENGTHS = np.resize([8, 5, 1], EXAMPLES)
SEGMENTS = np.broadcast_to(np.arange(8) >= 3, (EXAMPLES, 8)).astype(np.int64)

SIZE = {"width": 32, "depth": 2, "heads": 4}
HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


class Case(NamedTuple):
    """A model there and here, and how each is called."""

    theirs: Callable
    call_theirs: Callable
    ours: Callable[..., nnx.Module]
    inputs: tuple


def vit_there():
    config = transformers.ViTConfig(image_size=(8, 16), patch_size=4, num_labels=3, **HIDDEN)
    return transformers.ViTForImageClassification(config)


def bert_there():
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=16, num_labels=3, **HIDDEN)
    return transformers.BertForSequenceClassification(config)


def gpt2_there():
    sizes = {"vocab_size": 20, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def call_bert(model):
    mask = torch.tensor(np.arange(8) < LENGTHS[:, None]).long()
    return model(torch.tensor(TOKENS), attention_mask=mask, token_type_ids=torch.tensor(SEGMENTS)).logits


CASES = {
    "vit": Case(
        vit_there,
        lambda model: model(torch.tensor(IMAGES.transpose(0, 3, 1, 2)).to(model.dtype)).logits,
        functools.partial(
            ViT, image_shape=(8, 16, 3), num_classes=3, patch=4, pool="cls", epsilon=1e-12, dropout=0.1, **SIZE
        ),
        (IMAGES,),
    ),
    "bert": Case(
        bert_there,
        call_bert,
        functools.partial(BERT, vocabulary=20, length=16, num_classes=3, **SIZE),
        tuple(array.astype(np.int32) for array in (TOKENS, LENGTHS, SEGMENTS)),
    ),
    "gpt2": Case(
        gpt2_there,
        lambda model: model(torch.tensor(TOKENS)).logits,
        functools.partial(GPT2, vocabulary=20, length=16, **SIZE),
        (TOKENS.astype(np.int32),),
    ),
}


class Loaded(NamedTuple):
    """A case with random weights: theirs, ours without any weights, and the folder that theirs are saved in."""

    case: Case
    theirs: torch.nn.Module
    ours: nnx.Module
    folder: str


@pytest.fixture(params=CASES, scope="module")
def loaded(request, tmp_path_factory):
    return saved(CASES[request.param], tmp_path_factory.mktemp(request.param))


def saved(case: Case, folder) -> Loaded:
    torch.manual_seed(0)
    theirs = case.theirs().eval()
    for name, value in theirs.named_parameters():
        # No zeros and ones, which would hide a scale or a bias that went to another place.
        center = 1.0 if value.ndim == 1 and name.endswith("weight") else 0.0
        torch.nn.init.normal_(value, center, 0.2 if value.ndim == 1 else 0.1)
    theirs.save_pretrained(folder)
    return Loaded(case, theirs, nnx.eval_shape(lambda: case.ours(rngs=nnx.Rngs(0))), str(folder))


def logits_there(loaded: Loaded, dtype=torch.float32) -> np.ndarray:
    with torch.no_grad():
        logits = loaded.case.call_theirs(loaded.theirs.to(dtype)).float().numpy()
    loaded.theirs.float()
    return logits


def model_here(loaded: Loaded, policy: str = "float32") -> nnx.Module:
    model = loaded.case.ours(rngs=nnx.Rngs(0))
    report = mpjax.load_pretrained(model, loaded.folder)
    assert report.layout == "huggingface"
    mpjax.apply_policy(model, policy)
    model.eval()
    return model


def logits_here(loaded: Loaded, policy: str = "float32") -> np.ndarray:
    return np.asarray(nnx.jit(lambda model, inputs: model(*inputs))(model_here(loaded, policy), loaded.case.inputs))


def test_logits_in_float32_are_theirs(loaded):
    np.testing.assert_allclose(logits_here(loaded), logits_there(loaded), atol=1e-5)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_logits_in_bfloat16_are_as_near_to_float32_as_theirs(loaded, policy):
    exact = logits_there(loaded)

    def error(logits):
        return np.sqrt(np.mean((logits - exact) ** 2))

    theirs, ours = error(logits_there(loaded, torch.bfloat16)), error(logits_here(loaded, policy))
    assert 0 < ours < 1.25 * theirs


def test_an_export_in_their_layout_is_their_file(loaded, tmp_path):
    export_safetensors(model_here(loaded), tmp_path / "model.safetensors", layout="huggingface")
    theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (loaded.folder, tmp_path))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


def test_gradients_of_gpt2_are_theirs(tmp_path):
    loaded = saved(CASES["gpt2"], tmp_path)
    tokens = torch.tensor(TOKENS)
    loaded.theirs(tokens, labels=tokens).loss.backward()
    gradients = {name: value.grad.numpy() for name, value in loaded.theirs.named_parameters()}
    save_file(gradients, tmp_path / "gradients.safetensors")
    expected = loaded.case.ours(rngs=nnx.Rngs(0))
    mpjax.load_pretrained(expected, tmp_path / "gradients.safetensors")

    def loss(model, tokens):
        shares = jax.nn.log_softmax(model(tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(shares, tokens[:, 1:, None], axis=-1))

    actual = nnx.jit(nnx.grad(loss))(model_here(loaded), jnp.asarray(TOKENS, jnp.int32))
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(actual), nnx.to_flat_state(nnx.state(expected, nnx.Param)), strict=True
    ):
        difference, largest = jnp.max(jnp.abs(a[...] - b[...])), jnp.max(jnp.abs(b[...]))
        assert float(difference) < 1e-4 * float(largest) + 1e-8, path


def test_gpt2_files_of_the_first_days_have_no_base_and_hold_the_causal_mask(tmp_path):
    loaded = saved(CASES["gpt2"], tmp_path)
    tensors = {
        key.removeprefix("transformer."): value
        for key, value in load_file(tmp_path / "model.safetensors").items()
        if key != "lm_head.weight"
    }
    tensors["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_allclose(logits_here(loaded), logits_there(loaded), atol=1e-5)


def test_a_state_dict_of_vit_that_was_written_as_it_is(tmp_path):
    """Transformers 5 has other names in memory than in its files."""
    loaded = saved(CASES["vit"], tmp_path)
    logits = logits_there(loaded)
    state_dict = {name: value.numpy() for name, value in loaded.theirs.state_dict().items()}
    save_file(state_dict, tmp_path / "model.safetensors")
    model = loaded.case.ours(rngs=nnx.Rngs(0))
    report = mpjax.load_pretrained(model, loaded.folder)
    model.eval()
    assert report.layout == ("huggingface_state_dict" if "vit.layers.0.mlp.fc1.weight" in state_dict else "huggingface")
    np.testing.assert_allclose(np.asarray(model(*loaded.case.inputs)), logits, atol=1e-5)
