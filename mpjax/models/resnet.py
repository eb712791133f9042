"""ResNet v1.5 and ResNeXt: residual networks whose bottlenecks stride in the 3x3 convolution.

He et al., "Deep Residual Learning for Image Recognition", 2015 (arXiv:1512.03385); v1.5 as in NVIDIA's
DeepLearningExamples; last batch norm of each block starts at zero (Goyal et al., 2017, arXiv:1706.02677).
Xie et al., "Aggregated Residual Transformations for Deep Neural Networks", 2016 (arXiv:1611.05431).

Shapes: B batch, H height, W width, C channels, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models import batch_norm
from mpjax.models.activations import relu
from mpjax.models.batch_norm import relu_after
from mpjax.models.pooling import max_pool


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


# Padding is always explicit: XLA's "SAME" pads strided convolutions on the other side than PyTorch does, so PyTorch's
# weights would see images shifted by a pixel.
Conv = functools.partial(
    nnx.Conv, use_bias=False, kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")
)
BatchNorm = functools.partial(batch_norm.BatchNorm, momentum=0.9, epsilon=1e-5)
ZeroBatchNorm = functools.partial(BatchNorm, scale_init=nnx.initializers.zeros_init())


class Shortcut(nnx.Module):
    """A projection of a block's input to the shape of its output: 1x1 convolution and batch norm."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, *, rngs: nnx.Rngs):
        self.conv = Conv(channels_in, channels_out, (1, 1), strides=stride, rngs=rngs)
        self.norm = BatchNorm(channels_out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


def identity(x: jax.Array) -> jax.Array:
    """Returns x: the shortcut of a block whose input and output have the same shape."""
    return x


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions with a shortcut; the block of ResNet-18 and 34.

    Batch norm follows each convolution; ReLU follows the first norm and the sum. The first convolution has the stride.
    """

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int, *, rngs: nnx.Rngs):
        self.conv1 = Conv(channels_in, width, (3, 3), strides=stride, padding=1, rngs=rngs)
        self.norm1 = BatchNorm(width, rngs=rngs)
        self.conv2 = Conv(width, width, (3, 3), padding=1, rngs=rngs)
        self.norm2 = ZeroBatchNorm(width, rngs=rngs)
        same = stride == 1 and channels_in == width
        self.shortcut = identity if same else Shortcut(channels_in, width, stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = relu_after(self.norm1, self.conv1(x))
        y = self.norm2(self.conv2(y))
        return relu(y + self.shortcut(x))


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut; the block of ResNet-50, 101 and 152.

    Batch norm follows each convolution; ReLU follows the first two norms and the sum. The 3x3 convolution has the
    stride. The output has four times `width` channels.
    """

    expansion = 4
    groups = 1
    group_width = 64

    def __init__(self, channels_in: int, width: int, stride: int, *, rngs: nnx.Rngs):
        inner = self.groups * self.group_width * width // 64
        groups = math.gcd(self.groups, inner)
        channels_out = width * self.expansion
        self.conv1 = Conv(channels_in, inner, (1, 1), rngs=rngs)
        self.norm1 = BatchNorm(inner, rngs=rngs)
        self.conv2 = Conv(inner, inner, (3, 3), strides=stride, padding=1, feature_group_count=groups, rngs=rngs)
        self.norm2 = BatchNorm(inner, rngs=rngs)
        self.conv3 = Conv(inner, channels_out, (1, 1), rngs=rngs)
        self.norm3 = ZeroBatchNorm(channels_out, rngs=rngs)
        same = stride == 1 and channels_in == channels_out
        self.shortcut = identity if same else Shortcut(channels_in, channels_out, stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = relu_after(self.norm1, self.conv1(x))
        y = relu_after(self.norm2, self.conv2(y))
        y = self.norm3(self.conv3(y))
        return relu(y + self.shortcut(x))


class ResNeXtBottleneck(Bottleneck):
    """A bottleneck whose 3x3 convolution has 32 groups, with 4 channels each if width is 64: "32x4d".

    If 32 does not divide the channels of a narrow network, the number of groups is their greatest common divisor.
    """

    groups = 32
    group_width = 4


class ImageNetStem(nnx.Module):
    """7x7 convolution and 3x3 max-pooling, both of stride 2: a quarter of the input's height and width."""

    def __init__(self, channels_in: int, width: int, *, rngs: nnx.Rngs):
        self.conv = Conv(channels_in, width, (7, 7), strides=2, padding=((3, 3), (3, 3)), rngs=rngs)
        self.norm = BatchNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = relu_after(self.norm, self.conv(x))
        return max_pool(x, 3, stride=2, padding=((1, 1), (1, 1)))


class SmallStem(nnx.Module):
    """One 3x3 convolution at full resolution, for images of about 32 pixels or less."""

    def __init__(self, channels_in: int, width: int, *, rngs: nnx.Rngs):
        self.conv = Conv(channels_in, width, (3, 3), padding=1, rngs=rngs)
        self.norm = BatchNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return relu_after(self.norm, self.conv(x))


class ResNet(nnx.Module):
    """Stem, four stages of residual blocks, mean over the image, linear classifier.

    Args:
      stages: number of blocks in each stage; every stage after the first halves height and width.
      block: `BasicBlock`, `Bottleneck` or `ResNeXtBottleneck`.
      stem: `ImageNetStem` or `SmallStem`.
      channels: channels of the input image.
      width: channels of the first stage, doubled by each later stage.
      num_classes: number of logits.
    """

    def __init__(
        self,
        stages: tuple[int, ...],
        block: type[BasicBlock] | type[Bottleneck],
        stem: type[ImageNetStem] | type[SmallStem],
        *,
        channels: int,
        width: int,
        num_classes: int,
        rngs: nnx.Rngs,
    ):
        self.stem = stem(channels, width, rngs=rngs)
        blocks = []
        channels_in = width
        for stage, depth in enumerate(stages):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(channels_in, width * 2**stage, stride, rngs=rngs))
                channels_in = width * 2**stage * block.expansion
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels_in, num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


resnet18 = functools.partial(ResNet, (2, 2, 2, 2), BasicBlock)
resnet34 = functools.partial(ResNet, (3, 4, 6, 3), BasicBlock)
resnet50 = functools.partial(ResNet, (3, 4, 6, 3), Bottleneck)
resnet101 = functools.partial(ResNet, (3, 4, 23, 3), Bottleneck)
resnet152 = functools.partial(ResNet, (3, 8, 36, 3), Bottleneck)
resnext50 = functools.partial(ResNet, (3, 4, 6, 3), ResNeXtBottleneck)
