"""Networks for images give the logits and gradients of transformers on its weights, and give these back."""

import importlib
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import mpjax
from mpjax.models.vision import export_vision, interpolated, load_vision, make_network, settings_of


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
of_torch = importlib.import_module("safetensors.torch")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
HIDDEN = {"intermediate_size": 48}
CONVNEXT = {"num_stages": 3, "hidden_sizes": [8, 16, 32], "depths": [1, 2, 1], "image_size": 16, "patch_size": 2}
SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 3, "image_size": 16, "patch_size": 2}
TEXTS = VIT | HIDDEN | {"vocab_size": 20, "max_position_embeddings": 5}
TOWERS = {
    "vision_config": VIT | HIDDEN,
    "text_config": {key: size for key, size in TEXTS.items() if key not in ("image_size", "patch_size")},
}
UNREAD = {"clip": "post_layernorm", "siglip": "vision_model.head"}
OF_SEVERAL_WIDTHS = ("convnextv2", "swin")
CASES = {
    "vit": ("ViTForImageClassification", VIT | HIDDEN),
    "vit of tanh": (
        "ViTForImageClassification",
        VIT | HIDDEN | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "num_channels": 1},
    ),
    "deit": ("DeiTForImageClassification", VIT | HIDDEN),
    "deit with two heads": ("DeiTForImageClassificationWithTeacher", VIT | HIDDEN),
    "dinov2": ("Dinov2ForImageClassification", VIT | {"mlp_ratio": 2}),
    "dinov2 gated": ("Dinov2ForImageClassification", VIT | {"use_swiglu_ffn": True}),
    "registers": ("Dinov2WithRegistersForImageClassification", VIT | {"num_register_tokens": 3}),
    "registers gated": ("Dinov2WithRegistersForImageClassification", VIT | {"use_swiglu_ffn": True}),
    "convnextv2": ("ConvNextV2ForImageClassification", CONVNEXT),
    "dinov3": ("WithHead", VIT | HIDDEN | {"num_register_tokens": 2}),
    "dinov3 gated": (
        "WithHead",
        VIT | HIDDEN | {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False, "value_bias": False},
    ),
    "clip": ("CLIPForImageClassification", TOWERS),
    "siglip": ("SiglipForImageClassification", TOWERS),
    "swin": ("SwinForImageClassification", SWIN),
    "swin filled up": (
        "SwinForImageClassification",
        SWIN | {"patch_size": 3, "window_size": 2, "layer_norm_eps": 1e-3, "hidden_act": "relu", "mlp_ratio": 1.5},
    ),
}


class WithHead(torch.nn.Module):
    """DINOv3 with a head, which transformers does not have, for the class token."""

    def __init__(self, config):
        super().__init__()
        self.model = transformers.DINOv3ViTModel(config)
        self.classifier = torch.nn.Linear(config.hidden_size, 3)
        self.config = config

    def forward(self, images):
        return SimpleNamespace(logits=self.classifier(self.model(images).last_hidden_state[:, 0]))

    def save_pretrained(self, folder):
        """The files of the model itself, with the tensors of the head."""
        self.model.save_pretrained(folder)
        head = {f"classifier.{name}": value for name, value in self.classifier.state_dict().items()}
        file = f"{folder}/model.safetensors"
        of_torch.save_file(of_torch.load_file(file) | head, file, {"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder, attn_implementation="eager"):
        config = transformers.AutoConfig.from_pretrained(folder, attn_implementation=attn_implementation)
        model = cls(config)
        model.model = transformers.AutoModel.from_pretrained(folder, attn_implementation=attn_implementation)
        file = of_torch.load_file(f"{folder}/model.safetensors")
        model.classifier.load_state_dict({name: file[f"classifier.{name}"] for name in ("weight", "bias")})
        return model


class Saved(NamedTuple):
    """A model of transformers with random weights, and the folder that it is saved in."""

    theirs: torch.nn.Module
    folder: str
    size: int = 16

    @property
    def images(self) -> np.ndarray:
        config = self.theirs.config
        shape = (2, self.size, self.size, getattr(config, "vision_config", config).num_channels)
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def logits(self) -> torch.Tensor:
        # These have to be told of images of another size.
        told = self.theirs.config.model_type in ("vit", "deit", "clip", "siglip") and self.size != 16
        options = {"interpolate_pos_encoding": True} if told else {}
        return self.theirs(torch.tensor(self.images.transpose(0, 3, 1, 2)), **options).logits

    def ours(self, **options) -> nnx.Module:
        model = load_vision(self.folder, image_shape=self.images.shape[1:], num_classes=3, **options)
        model.eval()
        return model


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    for name, value in model.named_parameters():
        # No zeros and ones, which would hide a scale or a bias that went to another place.
        is_scale = value.ndim == 1 and name.endswith(("weight", "lambda1"))
        is_vector = value.numel() == value.shape[-1]
        torch.nn.init.normal_(value, 1.0 if is_scale else 0.0, 0.2 if is_vector else 0.1)
    return model.eval()


@pytest.fixture(params=CASES, scope="module")
def saved(request, tmp_path_factory):
    name, settings = CASES[request.param]
    kind = WithHead if name == "WithHead" else getattr(transformers, name)
    of_config = transformers.DINOv3ViTConfig if kind is WithHead else kind.config_class
    torch.manual_seed(0)
    theirs = randomised(kind(of_config(**settings, num_labels=3, attn_implementation="eager")))
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    return Saved(theirs, str(folder))


@nnx.jit
def logits(model, images):
    return model(images)


def test_logits_in_float32_are_theirs(saved):
    with torch.no_grad():
        expected = saved.logits().numpy()
    assert np.max(np.abs(expected)) > 0.3
    for scan in (False, True) if saved.theirs.config.model_type not in OF_SEVERAL_WIDTHS else (False,):
        actual = logits(saved.ours(scan_blocks=scan), jnp.asarray(saved.images))
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_images_of_another_size_are_read_as_theirs(saved):
    saved = saved._replace(size=28)
    with torch.no_grad():
        expected = saved.logits().numpy()
    np.testing.assert_allclose(logits(saved.ours(), jnp.asarray(saved.images)), expected, atol=1e-5)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("shape", [(3, 16), (37, 1), (7, 8)])
def test_interpolation_is_that_of_pytorch(shape, antialias):
    table = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    grid = torch.tensor(table.reshape(1, 8, 8, 5)).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, size=shape, mode="bicubic", align_corners=False, antialias=antialias)
    expected = grid.permute(0, 2, 3, 1).reshape(-1, 5)
    np.testing.assert_allclose(interpolated(jnp.asarray(table), shape, antialias=antialias), expected, atol=2e-6)


@pytest.mark.parametrize(
    "policy",
    ["mixed_float16", "O1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixed_bfloat16", "bfloat16"))],
)
def test_logits_in_low_precision_are_near(saved, policy):
    with torch.no_grad():
        exact = saved.logits().numpy()
    call = logits
    if policy == "O1":
        model, call = saved.ours(), mpjax.autocast(lambda model, images: model(images), policy="O1")
    else:
        model = saved.ours(policy=policy)
    actual = np.asarray(call(model, jnp.asarray(saved.images)), np.float32)
    assert 0 < np.max(np.abs(actual - exact)) < 0.05 * max(1, np.max(np.abs(exact)))


def test_gradients_are_theirs(saved, tmp_path):
    saved = saved._replace(size=24)  # so that position embeddings are interpolated
    saved.theirs.zero_grad()
    aim = torch.linspace(-1, 1, 2 * 3).reshape(2, 3)
    (saved.logits() * aim).sum().backward()
    gradients = {name: value.grad.numpy() for name, value in saved.theirs.named_parameters() if value.grad is not None}
    ours = saved.ours()

    def loss(model, images):
        return jnp.sum(model(images) * jnp.asarray(aim.numpy()))

    grads = nnx.jit(nnx.grad(loss))(ours, jnp.asarray(saved.images))
    nnx.update(ours, grads)
    export_vision(ours, tmp_path / "gradients", source=saved.folder)
    actual = load_file(tmp_path / "gradients" / "model.safetensors")
    theirs = saved.theirs
    for name, value in theirs.named_parameters():
        value.data = torch.tensor(gradients.get(name, np.zeros(value.shape, np.float32)))
    try:
        theirs.save_pretrained(tmp_path / "theirs")
    finally:
        theirs.load_state_dict(type(theirs).from_pretrained(saved.folder).state_dict())
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if "mask_token" not in name and UNREAD.get(theirs.config.model_type, " ") not in name:
            largest = np.max(np.abs(value), initial=0)
            np.testing.assert_allclose(actual[name], value, atol=1e-5 * max(largest, 1e-2), err_msg=name)


def test_an_export_is_their_file_and_they_load_it(saved, tmp_path):
    export_vision(saved.ours(), tmp_path / "out", source=saved.folder, classes=("cat", "dog", "owl"))
    theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (saved.folder, tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    kind = type(saved.theirs)
    known = kind is not WithHead and "Teacher" not in kind.__name__
    loads: Any = transformers.AutoModelForImageClassification if known else kind
    again = loads.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(again) is kind
    assert again.config.id2label == {0: "cat", 1: "dog", 2: "owl"}
    with torch.no_grad():
        assert torch.equal(saved._replace(theirs=again).logits(), saved.logits())


def test_a_file_without_head_is_read_and_its_pooler_is_not(tmp_path):
    torch.manual_seed(0)
    theirs = randomised(transformers.ViTModel(transformers.ViTConfig(**VIT, **HIDDEN)))
    theirs.save_pretrained(tmp_path / "in")
    assert "pooler.dense.weight" in load_file(tmp_path / "in" / "model.safetensors")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    model = make_network(settings_of(config), image_shape=(16, 16, 3), num_classes=3, rngs=nnx.Rngs(0))
    report = mpjax.load_pretrained(model, tmp_path / "in", skip=("head/*",))
    assert report.skipped == ("head/bias", "head/kernel")
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(images.transpose(0, 3, 1, 2))).last_hidden_state
    np.testing.assert_allclose(nnx.jit(lambda model, x: model.features(x))(model, images), expected, atol=1e-5)


def test_a_swin_does_not_shift_the_windows_of_a_stage_that_has_one(tmp_path):
    torch.manual_seed(0)
    config = transformers.SwinConfig(**SWIN | {"window_size": 4}, num_labels=3, attn_implementation="eager")
    theirs = randomised(transformers.SwinForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    saved = Saved(theirs, str(tmp_path))
    with torch.no_grad():
        expected = saved.logits().numpy()
    np.testing.assert_allclose(logits(saved.ours(), jnp.asarray(saved.images)), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_file_of_a_tower_alone_becomes_that_of_a_classifier(kind, tmp_path):
    torch.manual_seed(0)
    tower = getattr(transformers, f"{kind}VisionModel")
    theirs = randomised(tower(tower.config_class(**VIT, **HIDDEN)))
    theirs.save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    model = make_network(settings_of(config), image_shape=(16, 16, 3), num_classes=3, rngs=nnx.Rngs(0))
    mpjax.load_pretrained(model, tmp_path / "in", skip=("head/*",))
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
    expected = logits(model, jnp.asarray(images))
    export_vision(model, tmp_path / "out", source=tmp_path / "in")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == f"{kind}ForImageClassification"
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(after[f"vision_model.{name}"], value) for name, value in before.items())
    with torch.no_grad():
        actual = again.eval()(torch.tensor(images.transpose(0, 3, 1, 2))).logits
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    load_vision(tmp_path / "out", image_shape=(16, 16, 3), num_classes=3)
