"""The convolutional networks give timm's logits on timm's weights: same layers, order, strides and paddings."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from mpjax.models import ImageNetStem, convnext_t, resnet18, resnet50, resnext50, xception8


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
timm = pytest.importorskip("timm", reason="pip install -e '.[parity]'")

pytestmark = pytest.mark.extra


def randomised(net, side: int):
    """`net` in evaluation mode, scales and biases drawn at random, batch statistics those of eight random images.

    Statistics that no image has would let the signal grow or vanish from layer to layer, and hide every difference.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in net.named_parameters():
            if value.ndim == 1:
                value.normal_(0, 0.1) if name.endswith("bias") else value.uniform_(0.5, 1.5)
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        net.train()(torch.randn(8, 3, side, side))
    return net.eval()


def resnet_paths(blocks: tuple[int, ...]):
    """timm's names to ours: stages of blocks there, one list of blocks here."""

    def path(name: str) -> str:
        if match := re.match(r"layer(\d)\.(\d+)\.(.*)", name):
            stage, index, name = int(match[1]), int(match[2]), match[3]
            name = f"blocks.{sum(blocks[: stage - 1]) + index}.{name}"
            name = name.replace("downsample.0", "shortcut.conv").replace("downsample.1", "shortcut.norm")
            return re.sub(r"bn(\d)", r"norm\1", name)
        return name.replace("conv1", "stem.conv").replace("bn1", "stem.norm").replace("fc", "head")

    return path


def xception_path(name: str) -> str:
    name = re.sub(r"^conv([12])", r"stem.conv\1", name)
    name = re.sub(r"^bn([12])", r"stem.norm\1", name)
    name = re.sub(r"^conv([34])\.conv1", lambda m: f"conv{int(m[1]) - 2}.depthwise", name)
    name = re.sub(r"^conv([34])\.pointwise", lambda m: f"conv{int(m[1]) - 2}.pointwise", name)
    name = re.sub(r"^bn([34])", lambda m: f"conv{int(m[1]) - 2}.norm", name)
    if match := re.match(r"block(\d+)\.(.*)", name):
        index, name = int(match[1]) - 1, match[2]
        name = name.replace("skipbn", "shortcut.norm").replace("skip", "shortcut.conv")
        if part := re.match(r"rep\.(\d+)\.(conv1|pointwise|)\.?(.*)", name):
            # ReLU, convolution, norm, and again; the first block has no ReLU ahead, and starts at the convolution.
            number = (int(part[1]) + (index == 0)) // 3
            conv = f"convs.{number}" if 3 <= index <= 10 else f"conv{number + 1}"
            name = f"{conv}.{ {'conv1': 'depthwise', 'pointwise': 'pointwise', '': 'norm'}[part[2]] }.{part[3]}"
        return f"blocks.{index}.{name}"
    return name.replace("fc", "head")


def convnext_paths(blocks: tuple[int, ...]):
    """timm's names to ours: stages with a halving in front there, one list of layers here."""

    def path(name: str) -> str:
        if match := re.match(r"stages\.(\d)\.(downsample|blocks)\.(\d+)\.(.*)", name):
            stage, index, name = int(match[1]), int(match[3]), match[4]
            first = sum(blocks[:stage]) + stage  # the halvings before this stage and its own
            if match[2] == "downsample":
                return f"layers.{first - 1}.{('norm', 'conv')[index]}.{name}"
            name = name.replace("conv_dw", "depthwise").replace("gamma", "scale.scale")
            return f"layers.{first + index}.{name.replace('mlp.fc1', 'expand').replace('mlp.fc2', 'project')}"
        return (
            name.replace("stem.0", "stem.conv")
            .replace("stem.1", "stem.norm")
            .replace("head.norm", "norm")
            .replace("head.fc", "head")
        )

    return path


def converted(net, path) -> dict[str, np.ndarray]:
    """The arrays of a torch model under our names, their axes in our order."""
    arrays = {}
    for name, value in net.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        *place, kind = path(name).split(".")
        array = value.numpy()
        leaf = {"weight": "scale" if array.ndim == 1 else "kernel", "running_mean": "mean", "running_var": "var"}
        axes = {4: (2, 3, 1, 0), 2: (1, 0)}.get(array.ndim, (0,))
        arrays["/".join([*place, leaf.get(kind, kind)])] = array.transpose(axes)
    return arrays


def logits(make, arrays: dict[str, np.ndarray], images: np.ndarray) -> jax.Array:
    """What `make(rngs=...)` says of images, all its parameters and statistics taken from `arrays`."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    assert {name: leaf.shape for name, leaf in flat.items()} == {name: array.shape for name, array in arrays.items()}
    state = jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in flat])

    def evaluated(state, images):
        model = nnx.merge(graph, state)
        model.eval()
        return model(images)

    return jax.jit(evaluated)(state, images)


@pytest.mark.parametrize(
    ("name", "make", "path", "side"),
    [
        ("resnet18", functools.partial(resnet18, ImageNetStem, width=64), resnet_paths((2, 2, 2, 2)), 46),
        ("resnet50", functools.partial(resnet50, ImageNetStem, width=64), resnet_paths((3, 4, 6, 3)), 46),
        ("resnext50_32x4d", functools.partial(resnext50, ImageNetStem, width=64), resnet_paths((3, 4, 6, 3)), 46),
        ("legacy_xception", xception8, xception_path, 74),
        ("convnext_tiny", convnext_t, convnext_paths((3, 3, 9, 3)), 75),
    ],
)
def test_logits_are_timms(name, make, path, side):
    """At sides whose strided layers see both even and odd sizes, where paddings differ."""
    net = randomised(timm.create_model(name, pretrained=False, num_classes=10), side)
    make = functools.partial(make, channels=3, num_classes=10)
    arrays = converted(net, path)
    images = np.random.default_rng(0).normal(size=(2, side, side, 3)).astype(np.float32)
    with torch.no_grad():
        expected = net(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()
    found = logits(make, arrays, images)
    assert np.std(expected, axis=0).mean() > 0.03  # or any two images would be one
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
