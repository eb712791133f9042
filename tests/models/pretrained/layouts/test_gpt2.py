"""The place of GPT-2's variables in files of Hugging Face."""

import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import GPT2
from mpjax.models.pretrained import foreign_shape, load_pretrained, variables_of
from mpjax.models.pretrained.layouts import huggingface_gpt2


def make():
    sizes = {"vocabulary": 5, "length": 3, "width": 4, "depth": 2, "heads": 2}
    return nnx.eval_shape(lambda: GPT2(**sizes, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def file(model):
    """Tensors that fit, each filled with the numbers of its elements from 0."""
    shapes = {path: variable.get_value().shape for path, variable in variables_of(model).items()}
    entries = huggingface_gpt2(model).entries
    wanted = {entry.key: foreign_shape(shapes[path], entry) for path, entry in entries.items()}
    return {key: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for key, shape in wanted.items()}


def loaded(path):
    model = make()
    report = load_pretrained(model, path)
    assert report.layout == "huggingface"
    return report, {name: np.asarray(variable.get_value()) for name, variable in variables_of(model).items()}


@pytest.mark.parametrize(
    ("path", "key", "shape"),
    [
        ("tokens/embedding", "transformer.wte.weight", (5, 4)),
        ("positions", "transformer.wpe.weight", (3, 4)),
        ("blocks/1/norm1/scale", "transformer.h.1.ln_1.weight", (4,)),
        ("blocks/1/norm2/bias", "transformer.h.1.ln_2.bias", (4,)),
        ("blocks/0/attention/value/kernel", "transformer.h.0.attn.c_attn.weight", (4, 12)),
        ("blocks/0/attention/value/bias", "transformer.h.0.attn.c_attn.bias", (12,)),
        ("blocks/0/attention/out/kernel", "transformer.h.0.attn.c_proj.weight", (4, 4)),
        ("blocks/0/mlp/up/kernel", "transformer.h.0.mlp.c_fc.weight", (4, 16)),
        ("blocks/0/mlp/down/kernel", "transformer.h.0.mlp.c_proj.weight", (16, 4)),
        ("norm/scale", "transformer.ln_f.weight", (4,)),
    ],
)
def test_a_variable_is_where_transformers_has_it(model, file, path, key, shape):
    assert huggingface_gpt2(model).entries[path].key == key
    assert file[key].shape == shape


def test_query_key_and_value_are_the_thirds_of_one_matrix_split_into_heads(file, saved):
    _, arrays = loaded(saved(file))
    # The first input's row of the matrix is 0 to 11; of each third, two heads of two features.
    assert arrays["blocks/0/attention/query/kernel"][0].tolist() == [[0, 1], [2, 3]]
    assert arrays["blocks/0/attention/key/kernel"][0].tolist() == [[4, 5], [6, 7]]
    assert arrays["blocks/0/attention/value/kernel"][0].tolist() == [[8, 9], [10, 11]]
    assert arrays["blocks/1/attention/value/bias"].tolist() == [[8, 9], [10, 11]]


def test_kernels_are_not_transposed(file, saved):
    _, arrays = loaded(saved(file))
    assert arrays["blocks/0/mlp/up/kernel"][1, :3].tolist() == [16, 17, 18]
    assert arrays["blocks/0/attention/out/kernel"][1, 0].tolist() == [8, 9, 10, 11]  # the second head's first feature


def test_the_kernel_of_the_logits_may_repeat_the_embedding_but_not_contradict_it(file, saved):
    embedding = file["transformer.wte.weight"]
    loaded(saved(file | {"lm_head.weight": embedding}))
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        loaded(saved(file | {"lm_head.weight": embedding + 1}))


def test_constants_of_the_causal_mask_are_left_unread_and_biases_are_not(file, saved):
    masks = {f"transformer.h.1.attn.{name}": np.zeros(1, np.float32) for name in ("bias", "masked_bias")}
    report, arrays = loaded(saved(file | masks))
    assert report.ignored == ("transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias")
    assert arrays["blocks/1/attention/out/bias"].tolist() == [0, 1, 2, 3]
