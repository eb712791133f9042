"""Mamba-2 gives the logits and gradients of Hugging Face transformers on its weights, and gives these back."""

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
from mpjax.models.mamba2 import Mamba2, export_mamba2, load_mamba2, read_settings


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

TOKENS = np.random.default_rng(0).integers(2, 50, (4, 21))
INPUTS = jnp.asarray(TOKENS, jnp.int32)
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "eos_token_id": 2,
}
CASES = {
    "plain": {},
    "biases": {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "time_step_limit": (0.01, 0.5)},
}


class Saved(NamedTuple):
    """A model of transformers with random weights, and the folder that it is saved in."""

    theirs: torch.nn.Module
    folder: str


@pytest.fixture(params=CASES, scope="module")
def saved(request, tmp_path_factory):
    torch.manual_seed(0)
    theirs = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**SIZES, **CASES[request.param])).eval()
    for name, value in theirs.named_parameters():
        # No zeros and ones, which would hide a scale or a bias that went to another place.
        is_scale = value.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(value, 1.0 if is_scale else 0.0, 0.3)
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    return Saved(theirs, str(folder))


def test_logits_in_float32_are_theirs(saved):
    with torch.no_grad():
        expected = saved.theirs(torch.tensor(TOKENS)).logits.numpy()
    assert np.max(np.abs(expected)) > 0.9
    for scan in (False, True):
        ours = load_mamba2(saved.folder, scan_blocks=scan)(INPUTS)
        np.testing.assert_allclose(ours, expected, atol=1e-5 * np.max(np.abs(expected)))


def test_gradients_are_theirs(saved, tmp_path):
    tokens = torch.tensor(TOKENS)
    saved.theirs.zero_grad()
    saved.theirs(tokens, labels=tokens).loss.backward()
    gradients = copy.deepcopy(saved.theirs)
    for gradient, value in zip(gradients.parameters(), saved.theirs.parameters(), strict=True):
        gradient.data = value.grad
    gradients.save_pretrained(tmp_path)
    expected = Mamba2(read_settings(pathlib.Path(saved.folder)), rngs=nnx.Rngs(0))
    mpjax.load_pretrained(expected, tmp_path)

    def loss(model, tokens):
        shares = jax.nn.log_softmax(model(tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(shares, tokens[:, 1:, None], axis=-1))

    actual = nnx.jit(nnx.grad(loss))(load_mamba2(saved.folder), INPUTS)
    pairs = zip(nnx.to_flat_state(actual), nnx.to_flat_state(nnx.state(expected, nnx.Param)), strict=True)
    for (path, a), (_, b) in pairs:
        largest = float(jnp.max(jnp.abs(b[...])))
        np.testing.assert_allclose(a[...], b[...], atol=1e-5 * max(largest, 1e-2), err_msg=str(path))


def test_an_export_is_their_file_and_they_load_it(saved, tmp_path):
    out = str(tmp_path / "out")
    export_mamba2(load_mamba2(saved.folder), out, source=saved.folder)
    theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (saved.folder, out))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        assert torch.equal(again(torch.tensor(TOKENS)).logits, saved.theirs(torch.tensor(TOKENS)).logits)
