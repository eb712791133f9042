"""Export is the inverse of loading, bit for bit."""

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

import mpjax
from mpjax.errors import CheckpointWarning, UsageError
from mpjax.models import GPT2, Bottleneck, ImageNetStem, ResNet, one_by_one
from mpjax.models.pretrained import export_safetensors, variables_of


def resnet(rngs):
    return ResNet((1, 2), Bottleneck, ImageNetStem, channels=3, width=8, num_classes=5, rngs=rngs)


def filled(make, dtype):
    """A model whose every number is another, in `dtype`."""
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    mpjax.apply_policy(model, dtype)
    rng = np.random.default_rng(0)
    for variable in variables_of(model).values():
        value = variable.get_value()
        variable.set_value(jax.numpy.asarray(rng.uniform(0.5, 1.5, value.shape), value.dtype))
    return model


def gpt2(rngs):
    return GPT2(vocabulary=11, length=4, width=6, depth=1, heads=3, rngs=rngs)


def bits(model):
    return {name: np.asarray(variable.get_value()).tobytes() for name, variable in variables_of(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mpjax", "huggingface", "timm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_exported_and_loaded_again_is_bit_identical(tmp_path, layout, dtype):
    model = filled(resnet, dtype)
    export_safetensors(model, tmp_path / "a.safetensors", layout=layout)
    again = nnx.eval_shape(lambda: resnet(nnx.Rngs(1)))
    report = mpjax.load_pretrained(again, tmp_path / "a.safetensors", policy=dtype)
    assert report.layout == layout
    assert bits(again) == bits(model)
    export_safetensors(again, tmp_path / "b.safetensors", layout=layout)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_what_a_library_fuses_is_fused_and_taken_apart_again(tmp_path):
    model = filled(gpt2, "float32")
    export_safetensors(model, tmp_path / "a.safetensors", layout="huggingface")
    fused = load_file(tmp_path / "a.safetensors")["transformer.h.0.attn.c_attn.weight"]
    assert fused.shape == (6, 18)
    key = model.blocks[0].attention.key.kernel.get_value()
    np.testing.assert_array_equal(fused[:, 6:12].reshape(6, 3, 2), key)
    again = nnx.eval_shape(lambda: gpt2(nnx.Rngs(1)))
    mpjax.load_pretrained(again, tmp_path / "a.safetensors")
    assert bits(again) == bits(model)


@pytest.mark.parametrize(("factor", "accepted"), [(1, True), (2, False)])
def test_a_tensor_that_the_model_ties_to_another_must_be_equal_to_it(tmp_path, saved, factor, accepted):
    export_safetensors(filled(gpt2, "float32"), tmp_path / "a.safetensors", layout="huggingface")
    tensors = load_file(tmp_path / "a.safetensors")
    path = saved({**tensors, "lm_head.weight": factor * tensors["transformer.wte.weight"]})
    again = nnx.eval_shape(lambda: gpt2(nnx.Rngs(1)))
    if accepted:
        assert mpjax.load_pretrained(again, path).ignored == ()
    else:
        with pytest.raises(
            UsageError, match=r"lm_head.weight differs from transformer.wte.weight, but the model shares"
        ):
            mpjax.load_pretrained(again, path)


def test_our_own_layout_is_paths_joined_by_dots(small, tmp_path):
    report = export_safetensors(small, tmp_path / "new" / "a.safetensors")
    tensors = load_file(tmp_path / "new" / "a.safetensors")
    assert sorted(tensors) == [
        "head.kernel",
        "norm.bias",
        "norm.mean",
        "norm.scale",
        "norm.var",
        "stem.bias",
        "stem.kernel",
    ]
    np.testing.assert_array_equal(tensors["stem.kernel"], small.stem.kernel.get_value())
    assert next(row for row in report if row.path == "stem/kernel")[:3] == ("stem/kernel", "stem.kernel", (3, 2))


def test_a_dtype_is_for_parameters_statistics_stay_float32(small, tmp_path):
    export_safetensors(small, tmp_path / "a.safetensors", dtype="bfloat16")
    dtypes = {name: array.dtype for name, array in load_file(tmp_path / "a.safetensors").items()}
    assert (dtypes["stem.kernel"], dtypes["norm.scale"]) == (ml_dtypes.bfloat16, ml_dtypes.bfloat16)
    assert (dtypes["norm.mean"], dtypes["norm.var"]) == (np.float32, np.float32)


def test_values_that_the_files_dtype_cannot_hold_are_refused(small, tmp_path):
    small.stem.bias.set_value(jax.numpy.array([1e5, 1e-9]))
    with pytest.raises(UsageError) as raised:
        export_safetensors(small, tmp_path / "a.safetensors", dtype="float16")
    assert str(raised.value).splitlines() == [
        "values that the stored dtype cannot hold (nothing was written):",
        "  stem/bias: of 2 values in float32, 1 overflow and 1 flush to zero in float16",
        "write a wider dtype (on the command line --dtype bfloat16 or float32); in Python allow_lossy=True accepts "
        "the loss instead",
    ]
    assert list(tmp_path.iterdir()) == []
    report = export_safetensors(small, tmp_path / "a.safetensors", dtype="float16", allow_lossy=True)
    assert (report.overflow, report.flushed) == (1, 1)


@pytest.mark.parametrize(("layout", "says"), [("mpjax", "np"), ("timm", "pt"), ("huggingface", "pt")])
def test_a_file_says_for_which_library_it_is(tmp_path, layout, says):
    export_safetensors(filled(resnet, "float32"), tmp_path / "a.safetensors", layout=layout)
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"format": says}


def test_a_write_that_fails_leaves_the_old_file(small, tmp_path, monkeypatch):
    export_safetensors(small, tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()

    def full(_, path, **__):
        path.write_bytes(before[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr("mpjax.models.pretrained.export.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        export_safetensors(small, tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert (tmp_path / "a.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("a.bin", "mpjax", "a.bin: wanted a name that ends in .safetensors"),
        ("a.safetensors", "timm", "no layout 'timm' for Small: wanted one of mpjax"),
    ],
)
def test_what_cannot_be_written_is_refused(small, tmp_path, name, layout, says):
    with pytest.raises(UsageError, match=says):
        export_safetensors(small, tmp_path / name, layout=layout)


def test_a_variable_that_a_library_does_not_have_is_refused(tmp_path):
    model = nnx.eval_shape(lambda: resnet(nnx.Rngs(0)))
    model.extra = nnx.data(nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)))
    with pytest.raises(UsageError, match="the timm layout has no key for extra/kernel; write layout='mpjax'"):
        export_safetensors(model, tmp_path / "a.safetensors", layout="timm")


def small_gpt2(scan, seed=0):
    return GPT2(vocabulary=11, length=4, width=6, depth=3, heads=3, dropout=0.0, scan_blocks=scan, rngs=nnx.Rngs(seed))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mpjax", "huggingface"])
def test_the_file_of_a_stack_is_that_of_single_blocks_and_loads_into_both(tmp_path, layout):
    files = [tmp_path / f"{scan}.safetensors" for scan in (False, True)]
    reports = [export_safetensors(small_gpt2(scan), file, layout=layout) for scan, file in enumerate(files)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert reports[0].rows == reports[1].rows
    single, stacked = small_gpt2(False, seed=1), nnx.eval_shape(lambda: small_gpt2(True, seed=1))
    told = [mpjax.load_pretrained(model, files[0], policy="bfloat16").rows for model in (single, stacked)]
    assert told[0] == told[1]
    assert bits(one_by_one(stacked)) == bits(single)
    tokens = jax.numpy.arange(4)[None]
    mpjax.apply_policy(single, "float32")
    mpjax.apply_policy(stacked, "float32")
    np.testing.assert_allclose(stacked(tokens), single(tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_blocks_of_a_stack_that_are_skipped_keep_their_values(tmp_path):
    export_safetensors(small_gpt2(True), tmp_path / "a.safetensors")
    model = small_gpt2(True, seed=1)
    before = bits(one_by_one(model))
    mpjax.load_pretrained(model, tmp_path / "a.safetensors", skip=("blocks/1/*",))
    after, loaded = bits(one_by_one(model)), bits(small_gpt2(False))
    assert all(after[name] == (before if name.startswith("blocks/1/") else loaded)[name] for name in after)
    abstract = nnx.eval_shape(lambda: small_gpt2(True))
    with pytest.raises(UsageError, match="has arrays for some blocks and none for others"):
        mpjax.load_pretrained(abstract, tmp_path / "a.safetensors", skip=("blocks/1/*",))


def test_plain_arrays_are_not_in_the_file_and_named(tmp_path):
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    model.offsets = nnx.data(jax.numpy.arange(3))
    with pytest.warns(CheckpointWarning, match=r"a\.safetensors has no offsets: plain arrays"):
        report = export_safetensors(model, tmp_path / "a.safetensors")
    assert [row.path for row in report.rows] == ["bias", "kernel"]


def test_histories_of_float8_are_in_no_file_of_another_library_and_begin_with_zeros(tmp_path):
    def wide(seed):
        return GPT2(vocabulary=11, length=4, width=48, depth=1, heads=3, rngs=nnx.Rngs(seed))

    model = wide(0)
    delayed = "mixed_float8_delayed;type:linear_layer=float8_delayed"  # small layers too
    mpjax.apply_policy(model, delayed)
    history = model.blocks[0].mlp.up.amax_history
    history.set_value(history.get_value() + 3)
    for layout in ("mpjax", "huggingface"):
        export_safetensors(model, tmp_path / f"{layout}.safetensors", layout=layout)
    assert not [key for key in load_file(tmp_path / "huggingface.safetensors") if "amax" in key]

    def loaded(layout, policy):
        again = wide(1)
        mpjax.apply_policy(again, policy)
        mpjax.load_pretrained(again, tmp_path / f"{layout}.safetensors")
        return again.blocks[0].mlp.up

    assert float(loaded("huggingface", delayed).amax_history[0, 0]) == 0
    assert float(loaded("mpjax", delayed).amax_history[0, 0]) == 3
    plain = loaded("mpjax", "mixed_bfloat16")
    assert not hasattr(plain, "amax_history")
    np.testing.assert_array_equal(plain.kernel[...], model.blocks[0].mlp.up.kernel[...])
