"""The place of BERT's variables in files of Hugging Face."""

import numpy as np
import pytest
from flax import nnx

from mpjax.models import BERT
from mpjax.models.pretrained import Tensor, foreign_shape, match_arrays, variables_of
from mpjax.models.pretrained.layouts import huggingface_bert


@pytest.fixture(scope="module")
def model():
    sizes = {"vocabulary": 7, "length": 5, "num_classes": 3, "width": 4, "depth": 2, "heads": 2}
    return nnx.eval_shape(lambda: BERT(**sizes, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def shapes(model):
    """Of all tensors of a file, by key."""
    variables = variables_of(model)
    entries = huggingface_bert(model).entries
    return {entry.key: foreign_shape(variables[path].get_value().shape, entry) for path, entry in entries.items()}


def tensors(shapes, rename=lambda key: key):
    return {rename(key): Tensor(None, rename(key), shape, "float32") for key, shape in shapes.items()}


def test_every_variable_has_a_key_of_its_own(model, shapes):
    assert huggingface_bert(model).entries.keys() == variables_of(model).keys()
    assert len(shapes) == len(variables_of(model))


@pytest.mark.parametrize(
    ("path", "key", "shape"),
    [
        ("tokens/embedding", "bert.embeddings.word_embeddings.weight", (7, 4)),
        ("segments/embedding", "bert.embeddings.token_type_embeddings.weight", (2, 4)),
        ("positions", "bert.embeddings.position_embeddings.weight", (5, 4)),
        ("norm/scale", "bert.embeddings.LayerNorm.weight", (4,)),
        ("blocks/1/attention/key/kernel", "bert.encoder.layer.1.attention.self.key.weight", (4, 4)),
        ("blocks/1/attention/value/bias", "bert.encoder.layer.1.attention.self.value.bias", (4,)),
        ("blocks/0/attention/out/kernel", "bert.encoder.layer.0.attention.output.dense.weight", (4, 4)),
        ("blocks/0/norm1/bias", "bert.encoder.layer.0.attention.output.LayerNorm.bias", (4,)),
        ("blocks/0/norm2/bias", "bert.encoder.layer.0.output.LayerNorm.bias", (4,)),
        ("blocks/1/mlp/up/kernel", "bert.encoder.layer.1.intermediate.dense.weight", (16, 4)),
        ("blocks/1/mlp/down/kernel", "bert.encoder.layer.1.output.dense.weight", (4, 16)),
        ("pooler/kernel", "bert.pooler.dense.weight", (4, 4)),
        ("head/kernel", "classifier.weight", (3, 4)),
    ],
)
def test_a_variable_is_where_transformers_has_it(model, shapes, path, key, shape):
    assert huggingface_bert(model).entries[path].key == key
    assert shapes[key] == shape


def test_the_second_head_is_the_second_half_of_a_projections_outputs(model):
    theirs = np.arange(16).reshape(4, 4)  # out, in
    ours = (
        huggingface_bert(model).entries["blocks/0/attention/query/kernel"].transform.read(theirs)
    )  # in, head, feature
    assert ours[:, 1, 0].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        lambda key: key.removeprefix("bert."),
    ],
    ids=["norms of the first days", "without its base"],
)
def test_files_of_other_days_and_of_the_bare_encoder_are_read(model, shapes, rename):
    found = match_arrays(model, tensors(shapes, rename)).tensors
    assert found["blocks/0/norm1/scale"].key == rename("bert.encoder.layer.0.attention.output.LayerNorm.weight")


def test_heads_of_the_pretraining_and_numbers_of_positions_are_left_unread(model, shapes):
    extra = {
        "cls.predictions.bias": (7,),
        "cls.seq_relationship.weight": (2, 4),
        "bert.embeddings.position_ids": (1, 5),
    }
    assert match_arrays(model, tensors(shapes | extra)).ignored == (
        "bert.embeddings.position_ids",
        "cls.predictions.bias",
        "cls.seq_relationship.weight",
    )
