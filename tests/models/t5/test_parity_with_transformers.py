"""A T5 gives the logits and gradients of Hugging Face transformers on its weights, and gives these back."""

import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.models.t5 import T5, bucket_of, export_t5, load_t5, read_settings


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

LENGTHS = np.array([40, 7, 1, 33])
TARGET_LENGTHS = np.array([5, 24, 17, 1])
THERE, WRITTEN = (np.arange(size) < lengths[:, None] for size, lengths in ((40, LENGTHS), (24, TARGET_LENGTHS)))
SIZES = {
    "vocab_size": 50,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
}
CASES = {
    "t5": ("T5", {}),
    "v1.1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 20}),
    "gated silu": ("T5", {"feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-5, "decoder_start_token_id": 3}),
}
FREE = ("v1.1", "mt5")


class Saved(NamedTuple):
    """A model of transformers with random weights, and the folder that it is saved in."""

    theirs: torch.nn.Module
    folder: str

    def logits(self) -> torch.Tensor:
        start = torch.full((4, 1), self.theirs.config.decoder_start_token_id or 0)
        read = torch.cat([start, torch.tensor(TARGETS)[:, :-1]], dim=1)
        there = torch.tensor(THERE).long()
        return self.theirs(torch.tensor(TOKENS), attention_mask=there, decoder_input_ids=read).logits


drawn = np.random.default_rng(0)
TOKENS = np.where(THERE, drawn.integers(2, 50, THERE.shape), 0)
TARGETS = np.where(WRITTEN, drawn.integers(2, 50, WRITTEN.shape), 0)
INPUTS = tuple(jnp.asarray(x, jnp.int32) for x in (TOKENS, LENGTHS, TARGETS))


@pytest.fixture(params=CASES, scope="module")
def saved(request, tmp_path_factory):
    family, settings = CASES[request.param]
    config = getattr(transformers, f"{family}Config")(**{"decoder_start_token_id": 0, **SIZES, **settings})
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    if request.param in FREE:
        theirs.lm_head.weight = torch.nn.Parameter(torch.empty_like(theirs.shared.weight))
    for name, value in theirs.named_parameters():
        # No ones, which would hide a scale that went to another place.
        scale = "norm" in name
        torch.nn.init.normal_(value, 1.0 if scale else 0.0, 0.2 if scale else 0.5 if "bias" in name else 0.15)
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    return Saved(theirs.eval(), str(folder))


@nnx.jit
def logits(model, *inputs):
    return model(*inputs)


def loaded(saved: Saved, **options) -> nnx.Module:
    model = load_t5(saved.folder, **options)
    model.eval()
    return model


def test_logits_in_float32_are_theirs(saved):
    with torch.no_grad():
        expected = saved.logits().numpy()
    assert np.max(np.abs(expected)) > 0.4
    for scan in (False, True):
        actual = np.asarray(logits(loaded(saved, scan_blocks=scan), *INPUTS))
        np.testing.assert_allclose(actual, expected, atol=1e-5)


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
    aim = torch.tensor(np.random.default_rng(1).normal(size=(4, 24, 50)) * WRITTEN[..., None]).float()
    (saved.logits() * aim).sum().backward()
    gradients = {name: value.grad.numpy() for name, value in saved.theirs.named_parameters()}
    save_file(gradients, tmp_path / "gradients.safetensors")
    expected = T5(read_settings(pathlib.Path(saved.folder)), rngs=nnx.Rngs(0))
    mpjax.load_pretrained(expected, tmp_path / "gradients.safetensors")

    def loss(model, *inputs):
        return jnp.sum(model(*inputs) * jnp.asarray(aim.numpy()))

    actual = nnx.jit(nnx.grad(loss))(loaded(saved), *INPUTS)
    pairs = zip(nnx.to_flat_state(actual), nnx.to_flat_state(nnx.state(expected, nnx.Param)), strict=True)
    for (path, a), (_, b) in pairs:
        ours, theirs = np.array(a[...]), np.array(b[...])
        largest = np.max(np.abs(theirs))
        assert largest > 0, path
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(largest, 1e-2), err_msg=str(path))


def test_an_export_is_their_file_and_they_load_it(saved, tmp_path):
    out = str(tmp_path / "out")
    export_t5(load_t5(saved.folder), out, source=saved.folder)
    theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (saved.folder, out))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    assert type(again) is type(saved.theirs)
    with torch.no_grad():
        assert torch.equal(saved._replace(theirs=again).logits(), saved.logits())


@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (16, 20), (8, 1000)])
def test_distances_are_in_their_groups(both_sides, buckets, farthest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-3000, 3001)
    theirs = T5Attention._relative_position_bucket(torch.tensor(distance), both_sides, buckets, farthest).numpy()
    assert bucket_of(distance, buckets, farthest, both_sides=both_sides).tolist() == theirs.tolist()
