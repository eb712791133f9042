"""U-Net's numbers are those of a PyTorch one with its weights and statistics."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import TwoConvs, Up, unet64


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")

pytestmark = pytest.mark.extra


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
    ours = nnx.eval_shape(lambda: unet64(channels=3, num_classes=4, width=4, depth=2, rngs=nnx.Rngs(0)))
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
    ours, theirs = nnx.clone(pair[0]), copy.deepcopy(pair[1])  # training changes their statistics
    ours.set_attributes(use_running_average=not training)
    theirs.train(training)
    images = np.random.default_rng(1).standard_normal((2, *size, 3), np.float32)
    with torch.no_grad():
        wanted = theirs(torch.tensor(images.transpose(0, 3, 1, 2))).permute(0, 2, 3, 1).numpy()
    logits = nnx.jit(lambda model, x: model(x))(ours, jnp.asarray(images))
    assert np.abs(wanted).max() > 0.5
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
