"""The place of ViT's variables in files of Hugging Face and in state dicts of transformers 5."""

import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import ViT
from mpjax.models.pretrained import Tensor, foreign_shape, match_arrays, variables_of
from mpjax.models.pretrained.layouts import huggingface_vit, state_dict


def vit(pool):
    sizes = {"image_shape": (4, 6, 3), "num_classes": 5, "patch": 2, "width": 4, "depth": 2, "heads": 2}
    return nnx.eval_shape(lambda: ViT(**sizes, pool=pool, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def model():
    return vit("cls")


def shapes_of(model, layout):
    variables = variables_of(model)
    entries = layout(model).entries
    return {entry.key: foreign_shape(variables[path].get_value().shape, entry) for path, entry in entries.items()}


def tensors(shapes):
    return {key: Tensor(None, key, shape, "float32") for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("layout", "path", "key", "shape"),
    [
        (huggingface_vit, "class_token", "vit.embeddings.cls_token", (1, 1, 4)),
        (huggingface_vit, "positions", "vit.embeddings.position_embeddings", (1, 7, 4)),  # 2 x 3 patches and the token
        (huggingface_vit, "patches/kernel", "vit.embeddings.patch_embeddings.projection.weight", (4, 3, 2, 2)),
        (huggingface_vit, "blocks/1/norm1/scale", "vit.encoder.layer.1.layernorm_before.weight", (4,)),
        (huggingface_vit, "blocks/1/norm2/scale", "vit.encoder.layer.1.layernorm_after.weight", (4,)),
        (huggingface_vit, "blocks/0/mlp/up/kernel", "vit.encoder.layer.0.intermediate.dense.weight", (16, 4)),
        (huggingface_vit, "blocks/0/mlp/down/bias", "vit.encoder.layer.0.output.dense.bias", (4,)),
        (huggingface_vit, "blocks/0/attention/key/bias", "vit.encoder.layer.0.attention.attention.key.bias", (4,)),
        (huggingface_vit, "blocks/0/attention/out/bias", "vit.encoder.layer.0.attention.output.dense.bias", (4,)),
        (huggingface_vit, "head/kernel", "classifier.weight", (5, 4)),
        (state_dict, "blocks/1/norm1/scale", "vit.layers.1.layernorm_before.weight", (4,)),
        (state_dict, "blocks/1/mlp/up/kernel", "vit.layers.1.mlp.fc1.weight", (16, 4)),
        (state_dict, "blocks/1/mlp/down/kernel", "vit.layers.1.mlp.fc2.weight", (4, 16)),
        (state_dict, "blocks/1/attention/value/kernel", "vit.layers.1.attention.v_proj.weight", (4, 4)),
        (state_dict, "blocks/1/attention/out/kernel", "vit.layers.1.attention.o_proj.weight", (4, 4)),
    ],
)
def test_a_variable_is_where_transformers_has_it(model, layout, path, key, shape):
    assert layout(model).entries[path].key == key
    assert shapes_of(model, layout)[key] == shape


@pytest.mark.parametrize("layout", [huggingface_vit, state_dict])
def test_every_variable_has_a_key_of_its_own_in_both_layouts(model, layout):
    entries = layout(model).entries
    assert entries.keys() == variables_of(model).keys()
    assert len({entry.key for entry in entries.values()}) == len(entries)


@pytest.mark.parametrize(
    ("layout", "name"),
    [(huggingface_vit, "huggingface"), (state_dict, "huggingface_state_dict")],
    ids=["file", "memory"],
)
def test_the_names_of_the_blocks_tell_which_layout_a_file_has(model, layout, name):
    assert match_arrays(model, tensors(shapes_of(model, layout))).layout.name == name


def test_positions_keep_their_order_and_the_class_tokens_is_the_first(model):
    theirs = np.arange(28).reshape(1, 7, 4)
    ours = huggingface_vit(model).entries["positions"].transform.read(theirs)
    assert ours[[0, 6]].tolist() == [[0, 1, 2, 3], [24, 25, 26, 27]]


def test_the_pooler_is_left_unread(model):
    file = shapes_of(model, huggingface_vit) | {"vit.pooler.dense.weight": (4, 4)}
    assert match_arrays(model, tensors(file)).ignored == ("vit.pooler.dense.weight",)


def test_a_model_without_class_token_does_not_read_a_file_with_one_in_silence(model):
    with pytest.raises(UsageError) as raised:
        match_arrays(vit("gap"), tensors(shapes_of(model, huggingface_vit)))
    told = str(raised.value)
    assert "unexpected: vit.embeddings.cls_token" in told
    assert "shape: vit.embeddings.position_embeddings is (1, 7, 4), wanted (1, 6, 4)" in told
