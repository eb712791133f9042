"""The encoder gives the features and gradients of Hugging Face transformers on its weights, and gives these back."""

import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.models.encoder import export_encoder, load_encoder, make_classifier, make_encoder, read_settings


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

LENGTHS = np.array([12, 7, 1, 9])
THERE = np.arange(12) < LENGTHS[:, None]
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
MODERN = {"num_hidden_layers": 5, "local_attention": 4, "pad_token_id": 0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
BIASES = ("norm_bias", "attention_bias", "mlp_bias")
CASES = {
    "bert": ("BertConfig", {}),
    "bert with tanh": ("BertConfig", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "roberta": ("RobertaConfig", {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta": ("XLMRobertaConfig", {"pad_token_id": 1, "type_vocab_size": 1, "hidden_act": "relu"}),
    "camembert": ("CamembertConfig", {"pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": ("ModernBertConfig", {**MODERN, "global_attn_every_n_layers": 3}),
    "modernbert with biases": (
        "ModernBertConfig",
        {
            **MODERN,
            **dict.fromkeys(BIASES, True),
            "hidden_activation": "gelu_pytorch_tanh",
            "norm_eps": 1e-3,
            "layer_types": [f"{name}_attention" for name in ("sliding", "sliding", "full", "sliding", "full")],
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 20.0}},
        },
    ),
}
CLASSIFIERS = {
    "Bert": {"pad_token_id": 1},
    "Roberta": {"pad_token_id": 1},
    "ModernBert": MODERN,
    "ModernBert of means": {
        **MODERN,
        "classifier_pooling": "mean",
        "classifier_bias": True,
        "classifier_activation": "relu",
        "norm_bias": True,
    },
}


class Saved(NamedTuple):
    """A model of transformers with random weights, and the folder that it is saved in."""

    theirs: torch.nn.Module
    folder: str

    @property
    def tokens(self) -> np.ndarray:
        """Texts of 12 tokens with padding, int [4, 12]."""
        drawn = np.random.default_rng(0).integers(2, 50, (4, 12))
        return np.where(THERE, drawn, self.theirs.config.pad_token_id)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    for name, value in model.named_parameters():
        # No zeros and ones, which would hide a scale or a bias that went to another place.
        is_scale = value.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(value, 1.0 if is_scale else 0.0, 0.2 if value.ndim == 1 else 0.1)
    return model.eval()


@pytest.fixture(params=CASES, scope="module")
def saved(request, tmp_path_factory):
    kind, settings = CASES[request.param]
    config = getattr(transformers, kind)(**{**SIZES, **settings})
    torch.manual_seed(0)
    theirs = randomised(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    return Saved(theirs, str(folder))


@nnx.jit
def features(model, *inputs):
    return model.features(*inputs)


@nnx.jit
def vectors(model, *inputs):
    return model(*inputs)


def inputs_of(saved: Saved) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(saved.tokens, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)


def features_there(saved: Saved) -> torch.Tensor:
    return saved.theirs(torch.tensor(saved.tokens), attention_mask=torch.tensor(THERE).long()).last_hidden_state


def means(features: torch.Tensor) -> torch.Tensor:
    there = torch.tensor(THERE)[..., None].float()
    return torch.nn.functional.normalize((features * there).sum(1) / there.sum(1))


def loaded(saved: Saved, **options) -> nnx.Module:
    model = load_encoder(saved.folder, **options)
    model.eval()
    return model


def test_features_in_float32_are_theirs(saved):
    with torch.no_grad():
        expected = features_there(saved).numpy()
    assert np.max(np.abs(expected)) > 0.9
    for scan in (False, True):
        actual = np.asarray(features(loaded(saved, scan_blocks=scan), *inputs_of(saved)))
        np.testing.assert_allclose(actual[THERE], expected[THERE], atol=1e-5)


def test_vectors_in_float32_are_theirs(saved):
    with torch.no_grad():
        expected = means(features_there(saved)).numpy()
    np.testing.assert_allclose(vectors(loaded(saved), *inputs_of(saved)), expected, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "O1", "bfloat16"])
def test_vectors_in_half_precision_are_near_and_float32(saved, policy):
    with torch.no_grad():
        exact = means(features_there(saved)).numpy()
    call = vectors
    if policy == "O1":
        model, call = loaded(saved), mpjax.autocast(lambda model, *inputs: model(*inputs), policy="O1")
    else:
        model = loaded(saved, policy=policy)
    actual = call(model, *inputs_of(saved))
    assert actual.dtype == jnp.float32
    assert 0 < np.max(np.abs(np.asarray(actual) - exact)) < 0.02


def test_gradients_are_theirs(saved, tmp_path):
    saved.theirs.zero_grad()
    aim = torch.linspace(-1, 1, 4 * 32).reshape(4, 32)
    (means(features_there(saved)) * aim).sum().backward()
    gradients = {name: value.grad.numpy() for name, value in saved.theirs.named_parameters() if value.grad is not None}
    save_file(gradients, tmp_path / "gradients.safetensors")
    expected = make_encoder(read_settings(pathlib.Path(saved.folder)), rngs=nnx.Rngs(0))
    mpjax.load_pretrained(expected, tmp_path / "gradients.safetensors")

    def loss(model, *inputs):
        return jnp.sum(model(*inputs) * jnp.asarray(aim.numpy()))

    actual = nnx.jit(nnx.grad(loss))(loaded(saved), *inputs_of(saved))
    pairs = zip(nnx.to_flat_state(actual), nnx.to_flat_state(nnx.state(expected, nnx.Param)), strict=True)
    for (path, a), (_, b) in pairs:
        ours, theirs = np.array(a[...]), np.array(b[...])
        largest = np.max(np.abs(theirs))
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(largest, 1e-2), err_msg=str(path))


def test_an_export_is_their_file_and_they_load_it(saved, tmp_path):
    out = str(tmp_path / "out")
    export_encoder(load_encoder(saved.folder), out, source=saved.folder)
    theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (saved.folder, out))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    again = transformers.AutoModel.from_pretrained(out, attn_implementation="eager").eval()
    assert type(again) is type(saved.theirs)
    with torch.no_grad():
        assert torch.equal(features_there(saved._replace(theirs=again)), features_there(saved))


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_logits_of_a_classifier_are_theirs_and_it_goes_back(case, tmp_path):
    kind = case.split()[0]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **CLASSIFIERS[case]}, num_labels=3)
    torch.manual_seed(0)
    theirs = randomised(transformers.AutoModelForSequenceClassification.from_config(config))
    theirs.save_pretrained(tmp_path / "in")
    saved = Saved(theirs, str(tmp_path / "in"))
    model = make_classifier(read_settings(tmp_path / "in"), num_classes=3, rngs=nnx.Rngs(0))
    mpjax.load_pretrained(model, tmp_path / "in")
    model.eval()
    inputs = torch.tensor(saved.tokens), torch.tensor(THERE).long()
    with torch.no_grad():
        expected = theirs(*inputs).logits
    np.testing.assert_allclose(vectors(model, *inputs_of(saved)), expected.numpy(), atol=1e-5)
    export_encoder(model, tmp_path / "out", source=tmp_path / "in")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(*inputs).logits, expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        f"{kind}ForSequenceClassification"
    ]
