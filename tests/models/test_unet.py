"""U-Net as published: its size, images of any height and width, and the numbers of a PyTorch one with its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from mpjax.models.unet import TwoConvs, Up, unet


def abstract(**settings):
    return nnx.eval_shape(lambda: unet(rngs=nnx.Rngs(0), **settings))


def test_parameter_count_for_3_channels_and_1_class():
    """That of the usual PyTorch implementation (milesial/Pytorch-UNet, transposed convolutions)."""
    parameters = nnx.state(abstract(channels=3, num_classes=1), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == 31_037_633


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 16), (15, 37), (17, 3), (32, 63)])
def test_every_pixel_of_any_image_gets_logits(height, width):
    model = abstract(channels=2, num_classes=5, width=4)
    images = jax.ShapeDtypeStruct((3, height, width, 2), jnp.float32)
    assert nnx.eval_shape(lambda model, x: model(x), model, images).shape == (3, height, width, 5)


def test_each_level_halves_the_image_and_doubles_the_channels():
    model = abstract(channels=1, num_classes=2, width=8, depth=3)
    assert [convs.conv2.kernel.shape[-1] for convs in model.down] == [8, 16, 32, 64]
    assert [up.up.kernel.shape for up in model.up] == [(2, 2, 64, 32), (2, 2, 32, 16), (2, 2, 16, 8)]
    assert [up.convs.conv1.kernel.shape[2] for up in model.up] == [64, 32, 16]


def test_convolutions_have_no_bias_and_kernels_the_variance_of_their_fan_in():
    convs = TwoConvs(32, 32, rngs=nnx.Rngs(0))
    assert convs.conv1.bias is None
    assert float(jnp.std(convs.conv1.kernel[...])) == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.05)


# Parity


class TorchTwoConvs(torch.nn.Module):
    def __init__(self, channels_in, width):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels_in, width, 3, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(width)
        self.conv2 = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class TorchUNet(torch.nn.Module):
    def __init__(self, channels, num_classes, width):
        super().__init__()
        self.down = torch.nn.ModuleList(
            [TorchTwoConvs(channels, width), TorchTwoConvs(width, 2 * width), TorchTwoConvs(2 * width, 4 * width)]
        )
        self.doubling = torch.nn.ModuleList(
            [torch.nn.ConvTranspose2d(2 * wide, wide, 2, stride=2) for wide in (2 * width, width)]
        )
        self.convs = torch.nn.ModuleList([TorchTwoConvs(2 * wide, wide) for wide in (2 * width, width)])
        self.head = torch.nn.Conv2d(width, num_classes, 1)

    def forward(self, x):
        fine = self.down[0](x)
        middle = self.down[1](torch.nn.functional.max_pool2d(fine, 2, ceil_mode=True))
        x = self.down[2](torch.nn.functional.max_pool2d(middle, 2, ceil_mode=True))
        for double, convs, shortcut in zip(self.doubling, self.convs, (middle, fine), strict=True):
            x = double(x)[:, :, : shortcut.shape[2], : shortcut.shape[3]]
            x = convs(torch.cat([shortcut, x], dim=1))
        return self.head(x)


def conv_to_torch(ours: nnx.Conv, theirs: torch.nn.Conv2d):
    theirs.weight.data = torch.tensor(np.transpose(ours.kernel[...], (3, 2, 0, 1)))
    if ours.bias is not None:
        theirs.bias.data = torch.tensor(np.array(ours.bias[...]))


def two_convs_to_torch(ours: TwoConvs, theirs: TorchTwoConvs):
    for name in ("conv1", "conv2"):
        conv_to_torch(getattr(ours, name), getattr(theirs, name))
    for name in ("norm1", "norm2"):
        norm, other = getattr(ours, name), getattr(theirs, name)
        other.weight.data = torch.tensor(np.array(norm.scale[...]))
        other.bias.data = torch.tensor(np.array(norm.bias[...]))
        other.running_mean.data = torch.tensor(np.array(norm.mean[...]))
        other.running_var.data = torch.tensor(np.array(norm.var[...]))


@pytest.fixture(scope="module")
def pair():
    """Ours and PyTorch's with the same weights and statistics, none of which is 0 or 1."""
    ours = abstract(channels=3, num_classes=4, width=4, depth=2)
    random = np.random.default_rng(0)

    def fill(leaf):
        kernel = len(leaf.shape) == 4
        values = random.normal(0, 0.2, leaf.shape) if kernel else random.uniform(0.1, 0.9, leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    nnx.update(ours, jax.tree.map(fill, nnx.state(ours)))
    theirs = TorchUNet(3, 4, 4)
    for mine, other in zip(ours.down, theirs.down, strict=True):
        two_convs_to_torch(mine, other)
    for mine, double, convs in zip(ours.up, theirs.doubling, theirs.convs, strict=True):
        assert isinstance(mine, Up)
        # PyTorch's kernel is that of the convolution which this one is the transpose of: turned by 180 degrees.
        double.weight.data = torch.tensor(np.transpose(mine.up.kernel[...], (2, 3, 0, 1))[:, :, ::-1, ::-1].copy())
        double.bias.data = torch.tensor(np.array(mine.up.bias[...]))
        two_convs_to_torch(mine.convs, convs)
    conv_to_torch(ours.head, theirs.head)
    return ours, theirs


@pytest.mark.parametrize(
    ("size", "training"), [((16, 12), False), ((13, 10), False), ((1, 3), False), ((13, 10), True)]
)
def test_logits_equal_pytorchs(pair, size, training):
    ours, theirs = nnx.clone(pair[0]), pair[1]
    ours.set_attributes(use_running_average=not training)
    theirs.train(training)
    images = np.random.default_rng(1).standard_normal((2, *size, 3), np.float32)
    with torch.no_grad():
        wanted = theirs(torch.tensor(images.transpose(0, 3, 1, 2))).permute(0, 2, 3, 1).numpy()
    logits = nnx.jit(lambda model, x: model(x))(ours, jnp.asarray(images))
    assert np.abs(wanted).max() > 0.5
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
