"""ResNet on the weights of the originals says what the originals say."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.models import BasicBlock, Bottleneck, ImageNetStem, ResNet, resnet18
from mpjax.models.pretrained import export_safetensors
from mpjax.models.pretrained.layouts import layouts_of


IMAGES = np.random.default_rng(0).normal(size=(2, 48, 48, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        _ = transformers.ResNetForImageClassification  # imported only now, with warnings of its own
    torch.manual_seed(0)
    return torch


def stirred(model, torch):
    """Batch norms as after training: at first they do nothing, and would hide a mistake."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor, low, high in (
                (module.running_mean, -0.5, 0.5),
                (module.running_var, 0.5, 2),
                (module.weight, 0.5, 1.5),
                (module.bias, -0.5, 0.5),
            ):
                torch.nn.init.uniform_(tensor, low, high)
    return model.eval()


def transformers_resnet(torch, kind):
    import transformers

    sizes = [8, 16, 32] if kind == "basic" else [32, 64, 128]
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=sizes, depths=[2, 1, 2], layer_type=kind, num_labels=7
    )
    return stirred(transformers.ResNetForImageClassification(config), torch)


def shaped(make, *args, **settings):
    """A model without arrays: they come from the file."""
    return nnx.eval_shape(lambda: make(*args, channels=3, **settings, rngs=nnx.Rngs(0)))


def ours(kind):
    block = BasicBlock if kind == "basic" else Bottleneck
    return shaped(ResNet, (2, 1, 2), block, ImageNetStem, width=8, num_classes=7)


def logits(model, images=IMAGES):
    model.eval()
    return np.asarray(nnx.jit(lambda model, x: model(x))(model, jnp.asarray(images)).astype(jnp.float32))


def theirs(model, torch, images=IMAGES):
    with torch.no_grad():
        out = model(torch.tensor(images.transpose(0, 3, 1, 2)).to(next(model.parameters()).dtype))
    return getattr(out, "logits", out).float().numpy()


@pytest.mark.parametrize("kind", ["basic", pytest.param("bottleneck", marks=pytest.mark.slow)])
@pytest.mark.extra
def test_float32_logits_are_those_of_transformers(torch, tmp_path, kind):
    original = transformers_resnet(torch, kind)
    original.save_pretrained(tmp_path)
    model = ours(kind)
    report = mpjax.load_pretrained(model, tmp_path)
    assert (report.layout, report.skipped) == ("huggingface", ())
    want = theirs(original, torch)
    assert np.std(want) > 0.1
    np.testing.assert_allclose(logits(model), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["basic", pytest.param("bottleneck", marks=pytest.mark.slow)])
@pytest.mark.extra
def test_bfloat16_logits_are_as_near_to_float32_as_transformers_own(torch, tmp_path, kind):
    original = transformers_resnet(torch, kind)
    full = theirs(original, torch)
    original.bfloat16().save_pretrained(tmp_path)
    model = ours(kind)
    report = mpjax.load_pretrained(model, tmp_path, policy="bfloat16")
    assert {str(row.before) for row in report} == {"bfloat16"}
    mpjax.apply_policy(model, "bfloat16")
    scale = np.abs(full).max()
    error, their_error = (np.abs(got - full).max() / scale for got in (logits(model), theirs(original, torch)))
    assert error < 2 * max(their_error, 2**-8)
    assert error < 0.03


@pytest.mark.extra
def test_a_model_without_a_head_is_read_where_the_head_is_skipped(torch, tmp_path):
    original = transformers_resnet(torch, "basic")
    original.resnet.save_pretrained(tmp_path)
    model = ours("basic")
    report = mpjax.load_pretrained(model, tmp_path, skip=("head/*",))
    assert report.skipped == ("head/bias", "head/kernel")
    kernel = original.resnet.embedder.embedder.convolution.weight.detach().numpy()
    np.testing.assert_array_equal(model.stem.conv.kernel.get_value(), kernel.transpose(2, 3, 1, 0))


@pytest.mark.extra
def test_transformers_reads_what_is_exported_for_it(torch, tmp_path):
    import transformers

    original = transformers_resnet(torch, "bottleneck")
    original.save_pretrained(tmp_path / "a")
    model = ours("bottleneck")
    mpjax.load_pretrained(model, tmp_path / "a")
    export_safetensors(model, tmp_path / "b" / "model.safetensors", layout="huggingface")
    again, about = transformers.ResNetForImageClassification.from_pretrained(
        tmp_path / "b", config=original.config, output_loading_info=True
    )
    assert about["missing_keys"] == about["unexpected_keys"] == set()
    np.testing.assert_array_equal(theirs(again.eval(), torch), theirs(original, torch))


@pytest.mark.slow
@pytest.mark.extra
def test_timms_resnet18_goes_in_and_out(torch, tmp_path):
    timm = pytest.importorskip("timm")
    from safetensors.torch import load_file, save_file

    original = stirred(timm.create_model("resnet18", pretrained=False, num_classes=10), torch)
    save_file(original.state_dict(), tmp_path / "a.safetensors")
    model = shaped(resnet18, ImageNetStem, width=64, num_classes=10)
    assert mpjax.load_pretrained(model, tmp_path / "a.safetensors").layout == "timm"
    want = theirs(original, torch)
    assert np.std(want) > 0.1
    np.testing.assert_allclose(logits(model), want, rtol=0, atol=1e-4)

    export_safetensors(model, tmp_path / "b.safetensors", layout="timm")
    exported = load_file(tmp_path / "b.safetensors")
    assert exported.keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(exported[name], tensor), name


def test_stages_are_told_by_their_widths():
    model = shaped(ResNet, (1, 3), BasicBlock, ImageNetStem, width=4, num_classes=2)
    entries = layouts_of(model)["timm"](model).entries
    assert entries["blocks/1/shortcut/conv/kernel"].key == "layer2.0.downsample.0.weight"
    assert entries["blocks/3/norm2/var"].key == "layer2.2.bn2.running_var"
    assert len(entries) == len(jax.tree.leaves(nnx.state(model))) == 5 + 10 + 15 + 10 + 10 + 2
