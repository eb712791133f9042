"""The place of a decoder's variables in files of Hugging Face, in one file or several, in any dtype."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.errors import UsageError
from mpjax.models.decoder import Decoder, huggingface
from mpjax.models.pretrained import export_safetensors, foreign_shape, variables_of


def abstract(settings, **options):
    return nnx.eval_shape(lambda: Decoder(settings, **options, rngs=nnx.Rngs(0)))


def file_of(settings):
    """Tensors that fit, each filled with the numbers of its elements from 0."""
    model = abstract(settings)
    shapes = {path: variable.get_value().shape for path, variable in variables_of(model).items()}
    wanted = {entry.key: foreign_shape(shapes[path], entry) for path, entry in huggingface(model).entries.items()}
    return {key: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for key, shape in wanted.items()}


def loaded(settings, path, **options):
    model = abstract(settings, **options)
    report = mpjax.load_pretrained(model, path)
    assert report.layout == "huggingface"
    return report, {name: np.asarray(variable.get_value()) for name, variable in variables_of(model).items()}


@pytest.mark.parametrize(
    ("path", "key", "shape"),
    [
        ("tokens/embedding", "model.embed_tokens.weight", (20, 16)),
        ("blocks/1/norm1/scale", "model.layers.1.input_layernorm.weight", (16,)),
        ("blocks/1/norm2/scale", "model.layers.1.post_attention_layernorm.weight", (16,)),
        ("blocks/0/attention/query/kernel", "model.layers.0.self_attn.q_proj.weight", (16, 16)),
        ("blocks/0/attention/value/kernel", "model.layers.0.self_attn.v_proj.weight", (8, 16)),
        ("blocks/0/attention/out/kernel", "model.layers.0.self_attn.o_proj.weight", (16, 16)),
        ("blocks/0/mlp/gate/kernel", "model.layers.0.mlp.gate_proj.weight", (24, 16)),
        ("blocks/0/mlp/down/kernel", "model.layers.0.mlp.down_proj.weight", (16, 24)),
        ("norm/scale", "model.norm.weight", (16,)),
        ("head/kernel", "lm_head.weight", (20, 16)),
    ],
)
def test_a_variable_is_where_transformers_has_it(llama, path, key, shape):
    assert huggingface(abstract(llama)).entries[path].key == key
    assert file_of(llama)[key].shape == shape


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("blocks/1/norm_after_attention/scale", "model.layers.1.post_attention_layernorm.weight"),
        ("blocks/1/norm2/scale", "model.layers.1.pre_feedforward_layernorm.weight"),
        ("blocks/1/norm_after_mlp/scale", "model.layers.1.post_feedforward_layernorm.weight"),
        ("blocks/2/attention/query_norm/scale", "model.layers.2.self_attn.q_norm.weight"),
    ],
)
def test_the_norms_of_gemma_are_where_transformers_has_them(gemma, path, key):
    assert huggingface(abstract(gemma)).entries[path].key == key
    assert "lm_head.weight" not in file_of(gemma)


def test_kernels_are_transposed_and_split_into_heads(llama, tmp_path):
    save_file(file_of(llama), tmp_path / "model.safetensors")
    _, arrays = loaded(llama, tmp_path)
    # The first input's column of the matrix is 0, 16, 32, ...
    assert arrays["blocks/0/attention/key/kernel"][0].tolist() == [[0, 16, 32, 48], [64, 80, 96, 112]]
    assert arrays["blocks/0/attention/out/kernel"][1, 0, :2].tolist() == [4, 20]


def test_a_loop_of_blocks_loads_the_same(llama, tmp_path):
    save_file(file_of(llama), tmp_path / "model.safetensors")
    single, stacked = (loaded(llama, tmp_path, scan_blocks=scan)[1] for scan in (False, True))
    assert np.array_equal(stacked["blocks/all/mlp/up/kernel"][1], single["blocks/1/mlp/up/kernel"])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
def test_files_of_any_dtype_in_parts(llama, tmp_path, dtype):
    tensors = {key: (array % 64).astype(dtype) for key, array in file_of(llama).items()}
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    parts = {key: names[number % 2] for number, key in enumerate(tensors)}
    for name in names:
        save_file({key: array for key, array in tensors.items() if parts[key] == name}, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    report, arrays = loaded(llama, tmp_path)
    assert {row.before for row in report} == {np.dtype(dtype)}
    assert {array.dtype.name for array in arrays.values()} == {"float32"}
    expected = np.asarray(tensors["model.layers.1.mlp.up_proj.weight"], np.float32).T
    assert np.array_equal(arrays["blocks/1/mlp/up/kernel"], expected)


def test_every_tensor_is_used_or_named(llama, gemma, tmp_path):
    tensors, extra = file_of(llama), np.zeros(3, np.float32)
    save_file(tensors | {"model.layers.0.mlp.router.weight": extra}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"unexpected: model\.layers\.0\.mlp\.router\.weight"):
        loaded(llama, tmp_path)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": extra}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        loaded(llama, tmp_path)
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {old: extra}, tmp_path / "model.safetensors")
    assert loaded(llama, tmp_path)[0].ignored == (old,)
    save_file({key: array for key, array in tensors.items() if key != "lm_head.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"missing: lm_head\.weight \(head/kernel\)"):
        loaded(llama, tmp_path)
    save_file(file_of(gemma) | {"lm_head.weight": np.zeros((20, 16), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        loaded(gemma, tmp_path)


def test_a_tensor_of_another_shape_is_an_error(llama, tmp_path):
    tensors = file_of(llama) | {"model.layers.0.self_attn.k_proj.weight": np.zeros((16, 16), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"self_attn\.k_proj\.weight is \(16, 16\), wanted \(8, 16\)"):
        loaded(llama, tmp_path)


@pytest.mark.parametrize("scan", [False, True])
def test_an_export_has_the_tensors_that_were_loaded(gemma, tmp_path, scan):
    tensors = file_of(gemma)
    save_file(tensors, tmp_path / "model.safetensors")
    model = abstract(gemma, scan_blocks=scan)
    mpjax.load_pretrained(model, tmp_path)
    export_safetensors(model, tmp_path / "again.safetensors", layout="huggingface")
    again = load_file(tmp_path / "again.safetensors")
    assert jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), again, tensors) == dict.fromkeys(tensors, True)
