"""A folder of Hugging Face files becomes a decoder, and a decoder such a folder."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mpjax import models
from mpjax.config import Config, Data, Model
from mpjax.data import Tokens
from mpjax.errors import UsageError
from mpjax.models.decoder import Decoder, export_decoder, load_decoder, read_settings
from mpjax.models.pretrained import export_safetensors


TINY = pathlib.Path(__file__).with_name("tiny")
TOKENS = jnp.arange(8).reshape(1, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with random weights and a tokenizer of two tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copy(TINY / "config.json", folder)
    model = Decoder(read_settings(TINY), rngs=nnx.Rngs(0))
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    return folder


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def test_it_has_the_weights_of_the_folder_under_a_policy(folder):
    expected = logits(Decoder(read_settings(TINY), rngs=nnx.Rngs(0)), TOKENS)
    np.testing.assert_allclose(logits(load_decoder(folder), TOKENS), expected, atol=1e-6)
    half = load_decoder(folder, policy="bfloat16", scan_blocks=True)
    kernel, scale = half.blocks.all.mlp.up.kernel[...], half.norm.scale[...]
    assert (kernel.shape, kernel.dtype, scale.dtype) == ((3, 64, 128), jnp.bfloat16, jnp.float32)
    assert logits(half, TOKENS).dtype == jnp.float32


@pytest.mark.parametrize(("dtype", "named"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_an_exported_folder_is_loaded_again(folder, tmp_path, dtype, named):
    model = load_decoder(folder)
    export_decoder(model, tmp_path / "out", source=folder, dtype=dtype)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in folder.iterdir()}
    config, before = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", folder))
    assert config == before | {"torch_dtype": named}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(array.dtype) for array in tensors.values()} == {named}
    if dtype is None:
        assert np.array_equal(logits(load_decoder(tmp_path / "out"), TOKENS), logits(model, TOKENS))


def test_an_export_overwrites_nothing_and_takes_no_settings_of_another_model(folder, llama, tmp_path):
    with pytest.raises(UsageError, match=f"{folder} is not an empty folder"):
        export_decoder(load_decoder(folder), folder, source=folder)
    other = nnx.eval_shape(lambda: Decoder(llama, rngs=nnx.Rngs(0)))
    with pytest.raises(UsageError, match="has other settings than the model"):
        export_decoder(other, tmp_path / "out", source=folder)


FIELDS = {"tokens": Tokens(9, 260)}


def built(fields=FIELDS, **settings):
    config = Model(**{"name": f"hf:{TINY}", **settings})
    return nnx.eval_shape(lambda: models.build_model(config, fields=fields, rngs=nnx.Rngs(0)))


def test_the_settings_of_a_run_build_it():
    assert built().settings == read_settings(TINY)
    assert built(scan_blocks=True).blocks.depth == 3
    assert models.advice_on(Model(name=f"hf:{TINY}", pool="cls")) == [
        f"--model.pool cls without effect: hf:{TINY} does not read it"
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "hf:nowhere/at/all"}, "no file or folder nowhere/at/all"),
        ({"name": f"hf:{TINY / 'config.json'}"}, "is a file: wanted the folder that it is in"),
        ({"width": 32}, "--model.width 32: hf:.* has no such setting; leave it out"),
        ({"dropout": 0.1}, "--model.dropout 0.1: hf:.* has no such setting"),
        ({"fields": {"tokens": Tokens(9, 300)}}, "has 260 tokens, and the data 300: write --data.tokenizer"),
        ({"fields": {"tokens": Tokens(66, 260)}}, "at most 64 tokens, .* texts of 65: write --data.length 64"),
    ],
)
def test_what_does_not_fit_is_an_error(settings, says):
    with pytest.raises(UsageError, match=says):
        built(**settings)


def test_its_tokenizer_is_that_of_the_folder_unless_another_is_named():
    model = Model(name="hf:some/folder")
    assert Config(task="language_modeling", model=model).data.tokenizer == "some/folder"
    assert Config(task="language_modeling", model=model, data=Data(tokenizer="bytes")).data.tokenizer == "bytes"
    assert Config(task="classification", model=model).data.tokenizer == "bytes"  # of images
    assert Config().data.tokenizer == "bytes"


def test_its_weights_are_those_of_the_folder_unless_others_are_named():
    assert Model(name="hf:some/folder").weights == "some/folder"
    assert Model(name="hf:some/folder", pretrained="other").weights == "other"
    assert Model().weights == ""
