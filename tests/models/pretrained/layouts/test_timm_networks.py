"""Files of timm for EfficientNet, MobileNetV3, RegNet and DenseNet: what is refused, and older names."""

import functools
import json
import re

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.errors import UsageError
from mpjax.models import B0_STAGES, SMALL_STAGES, DenseNet, EfficientNet, MobileNetV3, SmallStem, regnetx
from mpjax.models.pretrained import export_safetensors, variables_of


def made(make, **settings):
    return make(channels=3, num_classes=2, rngs=nnx.Rngs(0), **settings)


NETWORKS = {
    "efficientnet": functools.partial(EfficientNet, 1.0, 1.0, B0_STAGES[:2], width=8),
    "mobilenetv3": functools.partial(MobileNetV3, SMALL_STAGES[:2], 64, width=8),
    "regnet": functools.partial(regnetx, (1, 1), (8, 16), 8),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_whose_stem_does_not_stride_is_not_timms(name, tmp_path):
    """It has the same weights, and would compute something else with them, here or there."""
    file = tmp_path / "model.safetensors"
    export_safetensors(made(NETWORKS[name]), file, layout="timm")
    fine = made(NETWORKS[name], stride=1)
    with pytest.raises(
        UsageError, match=r"stride by 2 in the first convolution, and this one by 1: write --model.stem"
    ):
        mpjax.load_pretrained(fine, file)
    with pytest.raises(UsageError, match="stride by 2 in the first convolution, and this one by 1"):
        export_safetensors(fine, tmp_path / "fine.safetensors", layout="timm")
    export_safetensors(fine, tmp_path / "fine.safetensors")
    assert mpjax.load_pretrained(fine, tmp_path / "fine.safetensors").layout == "mpjax"


def test_files_of_networks_that_pad_as_tensorflow_are_refused_where_config_json_names_them(tmp_path):
    model = made(NETWORKS["efficientnet"])
    export_safetensors(model, tmp_path / "model.safetensors", layout="timm")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architecture": "tf_efficientnet_b0", "num_classes": 2}))
    before = np.asarray(model.stem.conv.kernel[...])
    model.stem.conv.kernel[...] = 2 * before
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(UsageError, match=r"tf_efficientnet_b0 .*pads as TensorFlow.*take those of efficientnet_b0"):
            mpjax.load_pretrained(model, path)
    np.testing.assert_array_equal(model.stem.conv.kernel[...], 2 * before)
    config.write_text("[")
    with pytest.raises(UsageError, match=r"config.json is damaged"):
        mpjax.load_pretrained(model, tmp_path)
    config.write_text(json.dumps({"architecture": "efficientnet_b0"}))
    assert mpjax.load_pretrained(model, tmp_path).layout == "timm"
    np.testing.assert_array_equal(model.stem.conv.kernel[...], before)


def test_older_files_of_torchvision_have_dots_in_the_names_of_dense_layers(tmp_path):
    model = made(functools.partial(DenseNet, (1, 1), SmallStem, width=4))
    export_safetensors(model, tmp_path / "new.safetensors", layout="timm")
    new = load_file(tmp_path / "new.safetensors")
    renamed = {re.sub(r"(denselayer\d\.\w+)(\d)", r"\1.\2", key): array for key, array in new.items()}
    assert "features.denseblock1.denselayer1.norm.1.weight" in renamed
    save_file(renamed, tmp_path / "old.safetensors")
    other = nnx.eval_shape(lambda: made(functools.partial(DenseNet, (1, 1), SmallStem, width=4)))
    assert mpjax.load_pretrained(other, tmp_path / "old.safetensors").layout == "timm"
    for path, variable in variables_of(other).items():
        np.testing.assert_array_equal(variable.get_value(), variables_of(model)[path].get_value())
