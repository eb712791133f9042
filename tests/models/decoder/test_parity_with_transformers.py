"""The decoder gives the logits and gradients of Hugging Face transformers on its weights, and gives these back."""

import copy
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import mpjax
from mpjax.models.decoder import Decoder, export_decoder, load_decoder, read_settings


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

TOKENS = np.random.default_rng(0).integers(0, 50, (16, 12))
LENGTHS = np.resize([12, 7, 1], 16)

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

CASES = {
    "llama": ("LlamaConfig", {}),
    "llama 3": ("LlamaConfig", {"rope_parameters": LLAMA3, "head_dim": 16, "tie_word_embeddings": True}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "yarn": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 3, "num_key_value_heads": 1}),
    "qwen 2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen 3": ("Qwen3Config", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma 2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 3,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.0,
        },
    ),
    "gemma 3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 3, "query_pre_attn_scalar": 24, "layer_types": KINDS},
    ),
    "smollm 3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "qwen 3 moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "use_sliding_window": True,  # of all layers, whatever max_window_layers
            "sliding_window": 3,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 5}),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True}),
}


class Saved(NamedTuple):
    """A model of transformers with random weights, and the folder that it is saved in."""

    theirs: torch.nn.Module
    folder: str


@pytest.fixture(params=CASES, scope="module")
def saved(request, tmp_path_factory):
    kind, settings = CASES[request.param]
    config = getattr(transformers, kind)(**{**SIZES, **settings})
    torch.manual_seed(0)
    # The other implementations of attention leave out the caps of Gemma 2.
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    center = 0.0 if "Gemma" in kind else 1.0  # of the scales of norms
    for name, value in theirs.named_parameters():
        # No zeros and ones, which would hide a scale or a bias that went to another place.
        is_scale = value.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(value, center if is_scale else 0.0, 0.2 if value.ndim == 1 else 0.1)
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    return Saved(theirs, str(folder))


@nnx.jit
def logits(model, *inputs):
    return model(*inputs)


def logits_there(saved: Saved, dtype=torch.float32) -> np.ndarray:
    with torch.no_grad():
        return copy.deepcopy(saved.theirs).to(dtype)(torch.tensor(TOKENS)).logits.float().numpy()


INPUTS = jnp.asarray(TOKENS, jnp.int32)


def test_logits_in_float32_are_theirs(saved):
    expected = logits_there(saved)
    assert np.max(np.abs(expected)) > 0.9
    np.testing.assert_allclose(logits(load_decoder(saved.folder), INPUTS), expected, atol=1e-5)


def test_logits_of_blocks_in_a_loop_are_theirs(saved):
    np.testing.assert_allclose(
        logits(load_decoder(saved.folder, scan_blocks=True), INPUTS), logits_there(saved), atol=1e-5
    )


def test_logits_of_padded_texts_are_theirs(saved):
    there = np.arange(12) < LENGTHS[:, None]
    with torch.no_grad():
        expected = saved.theirs(torch.tensor(TOKENS), attention_mask=torch.tensor(there).long()).logits.numpy()
    actual = np.asarray(logits(load_decoder(saved.folder), INPUTS, jnp.asarray(LENGTHS, jnp.int32)))
    np.testing.assert_allclose(actual[there], expected[there], atol=1e-5)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_logits_in_bfloat16_are_as_near_to_float32_as_theirs(saved, policy):
    exact = logits_there(saved)
    # A token that other experts compute in bfloat16 is far off, here and there. How many are is chance.
    average = np.median if read_settings(pathlib.Path(saved.folder)).experts else np.mean

    def error(logits):
        return np.sqrt(average((logits - exact) ** 2))

    theirs = error(logits_there(saved, torch.bfloat16))
    assert 0 < error(np.asarray(logits(load_decoder(saved.folder, policy=policy), INPUTS))) < 1.25 * theirs


def test_gradients_are_theirs(saved, tmp_path):
    tokens = torch.tensor(TOKENS)
    saved.theirs.zero_grad()
    saved.theirs(tokens, labels=tokens).loss.backward()
    gradients = copy.deepcopy(saved.theirs)
    for gradient, value in zip(gradients.parameters(), saved.theirs.parameters(), strict=True):
        gradient.data = value.grad
    gradients.save_pretrained(tmp_path)
    expected = Decoder(read_settings(pathlib.Path(saved.folder)), rngs=nnx.Rngs(0))
    mpjax.load_pretrained(expected, tmp_path)

    def loss(model, tokens):
        shares = jax.nn.log_softmax(model(tokens)[:, :-1])
        # Their table has no gradient for the token of padding, where it is an input.
        return -jnp.mean(jnp.take_along_axis(shares, tokens[:, 1:, None], axis=-1))

    actual = nnx.jit(nnx.grad(loss))(load_decoder(saved.folder), INPUTS)
    pairs = zip(nnx.to_flat_state(actual), nnx.to_flat_state(nnx.state(expected, nnx.Param)), strict=True)
    for (path, a), (_, b) in pairs:
        ours, theirs = np.array(a[...]), np.array(b[...])
        if path == ("tokens", "embedding"):
            ours, theirs = ours[1:], theirs[1:]
        largest = np.max(np.abs(theirs))
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(largest, 1e-2), err_msg=str(path))


def test_an_export_is_their_file_and_they_load_it(saved, tmp_path):
    out = str(tmp_path / "out")
    export_decoder(load_decoder(saved.folder), out, source=saved.folder)
    theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (saved.folder, out))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    assert type(again) is type(saved.theirs)
    assert np.array_equal(logits_there(saved._replace(theirs=again)), logits_there(saved))
