"""EfficientNet, MobileNetV3, RegNet and DenseNet on timm's weights: its logits and gradients, and the file back."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.config import MODELS, Model
from mpjax.data import labelled_images
from mpjax.models import (
    B0_STAGES,
    LARGE_STAGES,
    SMALL_STAGES,
    DenseNet,
    EfficientNet,
    ImageNetStem,
    MobileNetV3,
    build_model,
    hard_swish,
    regnetx,
    regnety,
)
from mpjax.models.pretrained import export_safetensors, foreign_shape, variables_of
from mpjax.models.pretrained.layouts import layouts_of


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
timm = pytest.importorskip("timm", reason="pip install -e '.[parity]'")

pytestmark = pytest.mark.extra

SIDE = 45  # strided layers see odd and even sides, whose paddings differ
IMAGES = np.random.default_rng(0).normal(size=(8, SIDE, SIDE, 3)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)


class Case(NamedTuple):
    """A small network there and here."""

    theirs: Callable
    ours: Callable[..., nnx.Module]


def efficientnet():
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.efficientnet import EfficientNet

    stages = [["ds_r1_k3_s1_e1_c16_se0.25"], ["ir_r2_k3_s2_e6_c24_se0.25"], ["ir_r1_k5_s2_e6_c40_se0.25"]]
    return EfficientNet(
        decode_arch_def(stages),
        num_classes=5,
        num_features=1280,
        act_layer=torch.nn.SiLU,
    )


def mobilenet():
    from timm.models._efficientnet_blocks import SqueezeExcite
    from timm.models._efficientnet_builder import decode_arch_def, round_channels
    from timm.models.mobilenetv3 import MobileNetV3

    stages = [["ds_r1_k3_s1_e1_c16_se0.25_nre"], ["ir_r1_k3_s2_e4_c24_nre", "ir_r1_k3_s1_e3_c24"]]
    stages += [["ir_r1_k5_s2_e3_c40_se0.25"], ["cn_r1_k1_s1_c240"]]
    return MobileNetV3(
        decode_arch_def(stages),
        num_classes=5,
        num_features=64,
        act_layer=torch.nn.Hardswish,
        se_layer=functools.partial(
            SqueezeExcite, gate_layer="hard_sigmoid", force_act_layer=torch.nn.ReLU, rd_round_fn=round_channels
        ),
    )


def regnet(ratio):
    from timm.models.regnet import RegNet, RegNetCfg

    return RegNet(RegNetCfg(depth=7, w0=16, wa=16.0, wm=2.0, group_size=8, se_ratio=ratio), num_classes=5)


def densenet():
    from timm.models.densenet import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 1, 2), num_classes=5)


ROWS = (
    (SMALL_STAGES[0][0]._replace(stride=1),),
    (LARGE_STAGES[1][0], LARGE_STAGES[1][1]._replace(activation=hard_swish)),
    (SMALL_STAGES[2][0]._replace(expanded=72),),
)
WIDTHS = (1, 1, 3, 2), (16, 32, 64, 128), 8

CASES = {
    "efficientnet": Case(
        efficientnet, functools.partial(EfficientNet, 1.0, 1.0, (*B0_STAGES[:2], B0_STAGES[2]._replace(depth=1)))
    ),
    "mobilenetv3": Case(mobilenet, functools.partial(MobileNetV3, ROWS, 64)),
    "regnetx": Case(functools.partial(regnet, 0.0), functools.partial(regnetx, *WIDTHS)),
    "regnety": Case(functools.partial(regnet, 0.25), functools.partial(regnety, *WIDTHS)),
    "densenet": Case(densenet, functools.partial(DenseNet, (2, 1, 2), ImageNetStem, width=16)),
}


TIMMS = {
    **{name: name for name in MODELS if name.startswith(("efficientnet", "regnet", "densenet"))},
    "mobilenetv3_large": "mobilenetv3_large_100",
    "mobilenetv3_small": "mobilenetv3_small_100",
}
"""The names of timm."""


class Loaded(NamedTuple):
    """A network there, with its file, and here, with the weights of the file."""

    theirs: torch.nn.Module
    ours: nnx.Module
    file: str


def stirred(net):
    """Scales and biases at random, and statistics of random images: untrained ones do nothing, and hide a mistake."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in net.named_parameters():
            if value.ndim == 1:
                value.normal_(0, 0.1) if name.endswith("bias") else value.uniform_(0.5, 1.5)
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        net.train()(torch.randn(8, 3, SIDE, SIDE))
    return net


@pytest.fixture(params=CASES, scope="module")
def loaded(request, tmp_path_factory):
    from safetensors.torch import save_file

    case = CASES[request.param]
    theirs = stirred(case.theirs())
    file = str(tmp_path_factory.mktemp(request.param) / "model.safetensors")
    save_file({key: value.contiguous() for key, value in theirs.state_dict().items()}, file)
    ours = nnx.eval_shape(lambda: case.ours(channels=3, num_classes=5, rngs=nnx.Rngs(0)))
    assert mpjax.load_pretrained(ours, file).layout == "timm"
    return Loaded(theirs, ours, file)


def in_torch(net, images, dtype):
    """Logits and gradients there, by the keys of the file."""
    net.to(dtype).zero_grad()
    logits = net(torch.from_numpy(images.transpose(0, 3, 1, 2)).to(dtype))
    (logits * torch.from_numpy(WEIGHTS)).sum().backward()
    gradients = {name: value.grad.numpy() for name, value in net.named_parameters()}
    return logits.detach().numpy(), gradients


def here(net, images, *, train):
    """Logits and gradients here, by the keys of the file."""
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def loss(params, rest, images):
        model = nnx.merge(graph, params, rest, copy=True)
        model.train() if train else model.eval()
        logits = model(images)
        return jnp.sum(logits * WEIGHTS.astype(logits.dtype)), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params, rest, images)
    entries = layouts_of(net)["timm"](net).entries
    flat = {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(gradients)}
    return logits, {entries[path].key: entries[path].transform.write(np.asarray(flat[path])) for path in flat}


def assert_near(found, wanted, tolerance):
    """Logits by their largest, and each gradient by its largest."""
    (logits, ours), (their_logits, theirs) = found, wanted
    assert np.std(their_logits, axis=0).mean() > 0.03  # or any two images would be one
    np.testing.assert_allclose(logits, their_logits, rtol=0, atol=tolerance * np.abs(their_logits).max())
    assert ours.keys() == theirs.keys()
    largest = {name: np.abs(gradient).max() for name, gradient in theirs.items()}
    least = 1e-6 * max(largest.values())  # a norm takes away the bias of the norm before it, whose gradient is 0
    errors = {name: np.abs(ours[name] - theirs[name]).max() / max(largest[name], least) for name in theirs}
    assert max(errors.values()) < tolerance, max(errors, key=lambda name: errors[name])


def test_logits_and_gradients_in_evaluation_are_timms(loaded):
    wanted = in_torch(loaded.theirs.eval(), IMAGES, torch.float32)
    assert_near(here(loaded.ours, IMAGES, train=False), wanted, 1e-5)


def test_logits_and_gradients_in_training_are_timms(loaded):
    """In float64: batch norms after batch norms make more of what float32 rounds than 1e-5, there as here."""
    wanted = in_torch(loaded.theirs.train(), IMAGES, torch.float64)
    with jax.enable_x64(True):
        graph, state = nnx.split(loaded.ours)
        wide = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.float64), state))
        assert_near(here(wide, IMAGES.astype(np.float64), train=True), wanted, 1e-7)
    loaded.theirs.float()


@pytest.mark.parametrize("name", TIMMS)
def test_a_network_as_published_has_the_keys_and_shapes_of_timms(name):
    with torch.device("meta"):
        theirs = timm.create_model(TIMMS[name]).state_dict()
    config, fields = Model(name=name, stem="imagenet"), labelled_images(1000, (224, 224, 3))
    ours = nnx.eval_shape(lambda: build_model(config, fields=fields, rngs=nnx.Rngs(0)))
    layout = layouts_of(ours)["timm"](ours)
    shapes = {path: variable.get_value().shape for path, variable in variables_of(ours).items()}
    found = {entry.key: foreign_shape(shapes[path], entry) for path, entry in layout.entries.items()}
    found |= {key: value.shape for key, value in layout.filler.items()}
    assert found == {key: tuple(value.shape) for key, value in theirs.items()}


def test_an_exported_file_is_the_one_that_was_read(loaded, tmp_path):
    from safetensors.torch import load_file

    export_safetensors(loaded.ours, tmp_path / "b.safetensors", layout="timm")
    exported, original = load_file(tmp_path / "b.safetensors"), load_file(loaded.file)
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert name.endswith("num_batches_tracked") or torch.equal(exported[name], tensor), name
