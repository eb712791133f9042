"""CLIP and SigLIP give the vectors, loss and gradients of transformers on its weights, and give these back."""

import json
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mpjax.models.image_text import export_image_text, load_image_text
from mpjax.precision import get_policy
from mpjax.training import image_text


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VISION = SIZES | {"image_size": 16, "patch_size": 4}
TEXT = SIZES | {"vocab_size": 20, "max_position_embeddings": 6, "eos_token_id": 19, "hidden_size": 24}


class Saved(NamedTuple):
    """A model of transformers with random weights, the folder that it is saved in, and a batch."""

    theirs: Any
    folder: str
    batch: dict[str, np.ndarray]

    def outputs(self) -> Any:
        images = torch.tensor(self.batch["image"].transpose(0, 3, 1, 2))
        tokens = torch.tensor(self.batch["tokens"], dtype=torch.long)
        return self.theirs(input_ids=tokens, pixel_values=images, return_loss=True)

    def ours(self, **options) -> Any:
        model = load_image_text(self.folder, image_shape=(16, 16, 3), **options)
        model.eval()
        return model


@pytest.fixture(params=["CLIP", "Siglip"], scope="module")
def saved(request, tmp_path_factory):
    kind, folder = request.param, tmp_path_factory.mktemp("folder")
    torch.manual_seed(0)
    options = {"projection_dim": 16} if kind == "CLIP" else {}
    text = TEXT if kind == "CLIP" else TEXT | {"projection_size": 32}
    config = getattr(transformers, f"{kind}Config")(vision_config=VISION, text_config=text, **options)
    config._attn_implementation = "eager"
    theirs = getattr(transformers, f"{kind}Model")(config).eval()
    for name, value in theirs.named_parameters():
        # No zeros and ones, which would hide a scale or a bias that went to another place.
        is_scale = value.ndim == 1 and name.endswith("weight")
        is_vector = value.numel() == value.shape[-1] if value.ndim else True
        torch.nn.init.normal_(value, 1.0 if is_scale or name == "logit_scale" else 0.0, 0.2 if is_vector else 0.1)
    theirs.save_pretrained(folder)
    draws = np.random.default_rng(0)
    tokens = draws.integers(1, 19, (4, 6)).astype(np.int32)
    lengths = np.asarray([6, 4, 5, 2], np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[length - 1 :] = 19  # the token that ends a text also fills it up
    images = draws.normal(size=(4, 16, 16, 3)).astype(np.float32)
    return Saved(theirs, str(folder), {"image": images, "tokens": tokens, "length": lengths})


def loss(model, batch):
    return jnp.mean(image_text(get_policy("float32"))(model, batch, None)["loss"])


def test_vectors_and_loss_are_theirs(saved):
    with torch.no_grad():
        expected = saved.outputs()
    batch = saved.batch
    for scan in (False, True):
        ours = saved.ours(scan_blocks=scan)
        vectors = nnx.jit(lambda model, *inputs: model(*inputs))(ours, batch["image"], batch["tokens"], batch["length"])
        vectors = vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)
        np.testing.assert_allclose(vectors[:, 0], expected.image_embeds, atol=1e-5)
        np.testing.assert_allclose(vectors[:, 1], expected.text_embeds, atol=1e-5)
        np.testing.assert_allclose(nnx.jit(loss)(ours, batch), expected.loss, rtol=1e-5)


def test_gradients_are_theirs(saved, tmp_path):
    saved.theirs.zero_grad()
    saved.outputs().loss.backward()
    gradients = {name: value.grad for name, value in saved.theirs.named_parameters()}
    ours = saved.ours()
    nnx.update(ours, nnx.jit(nnx.grad(loss))(ours, saved.batch))
    export_image_text(ours, tmp_path / "out", source=saved.folder)
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert actual.keys() == gradients.keys()
    for name, value in gradients.items():
        assert value is not None, name
        largest = float(value.abs().max())
        np.testing.assert_allclose(actual[name], value.numpy(), atol=1e-5 * max(largest, 1e-2), err_msg=name)


def test_an_export_is_their_file_and_they_load_it(saved, tmp_path):
    export_image_text(saved.ours(), tmp_path / "out", source=saved.folder)
    theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (saved.folder, tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) and ours[key].shape == theirs[key].shape for key in theirs)
    again = transformers.AutoModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(again) is type(saved.theirs)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] in ("clip", "siglip")
    with torch.no_grad():
        assert torch.equal(saved._replace(theirs=again).outputs().loss, saved.outputs().loss)
