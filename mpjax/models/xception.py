"""Xception: residual networks of separable convolutions (depthwise, then 1x1 across channels).

Chollet, "Xception: Deep Learning with Depthwise Separable Convolutions", 2016 (arXiv:1610.02357), figure 5; padding
and batch norms follow its PyTorch implementations.

Shapes: B batch, H height, W width, C channels, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.batch_norm import relu_after
from mpjax.models.pooling import max_pool
from mpjax.models.resnet import BatchNorm, Conv, Shortcut, identity


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class SeparableConv(nnx.Module):
    """A 3x3 depthwise convolution, a 1x1 convolution across channels, and batch norm."""

    def __init__(self, channels_in: int, channels_out: int, *, rngs: nnx.Rngs):
        self.depthwise = Conv(
            channels_in,
            channels_in,
            (3, 3),
            padding=1,
            feature_group_count=channels_in,
            # The fan-in is nine however many channels there are, and no ReLU follows.
            kernel_init=nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"),
            rngs=rngs,
        )
        self.pointwise = Conv(channels_in, channels_out, (1, 1), rngs=rngs)
        self.norm = BatchNorm(channels_out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.pointwise(self.depthwise(x)))


class MiddleBlock(nnx.Module):
    """Three separable convolutions with ReLU before each, whose result is added to the input."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.convs = nnx.List([SeparableConv(width, width, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for conv in self.convs:
            y = conv(nnx.relu(y))
        return y + x


class HalvingBlock(nnx.Module):
    """Two separable convolutions and 3x3 max-pooling of stride 2; the shortcut is a 1x1 convolution of stride 2.

    Args:
      channels_in: channels of the input.
      channels: channels after each of the two convolutions.
      activation: applied before the first convolution: ReLU, or `identity` if the input already comes from a ReLU.
    """

    def __init__(self, channels_in: int, channels: tuple[int, int], activation: Callable = nnx.relu, *, rngs: nnx.Rngs):
        self.activation = activation
        self.conv1 = SeparableConv(channels_in, channels[0], rngs=rngs)
        self.conv2 = SeparableConv(channels[0], channels[1], rngs=rngs)
        self.shortcut = Shortcut(channels_in, channels[1], stride=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv1(self.activation(x))
        y = self.conv2(nnx.relu(y))
        return max_pool(y, 3, stride=2, padding=((1, 1), (1, 1))) + self.shortcut(x)


class XceptionStem(nnx.Module):
    """Two 3x3 convolutions without padding, the first of stride 2: about half of the input's height and width."""

    stride = 2
    padding = 0

    def __init__(self, channels_in: int, width: int, *, rngs: nnx.Rngs):
        self.conv1 = Conv(channels_in, width, (3, 3), strides=self.stride, padding=self.padding, rngs=rngs)
        self.norm1 = BatchNorm(width, rngs=rngs)
        self.conv2 = Conv(width, 2 * width, (3, 3), padding=self.padding, rngs=rngs)
        self.norm2 = BatchNorm(2 * width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = relu_after(self.norm1, self.conv1(x))
        return relu_after(self.norm2, self.conv2(x))


class SmallXceptionStem(XceptionStem):
    """Two 3x3 convolutions at full resolution, for images of about 32 pixels or less."""

    stride = 1
    padding = 1


class Xception(nnx.Module):
    """Stem, entry flow, middle flow, exit flow, mean over the image, linear classifier.

    Args:
      stem: `XceptionStem` or `SmallXceptionStem`.
      channels: channels of the input image.
      width: channels of the first convolution; the others keep the paper's ratios to it: 2 for the second convolution,
        22.75 for the middle flow, 64 for the last convolution.
      depth: number of blocks in the middle flow.
      num_classes: number of logits.
    """

    def __init__(
        self,
        stem: type[XceptionStem] = XceptionStem,
        *,
        channels: int,
        width: int = 32,
        depth: int = 8,
        num_classes: int,
        rngs: nnx.Rngs,
    ):
        middle = 728 * width // 32
        self.stem = stem(channels, width, rngs=rngs)
        self.blocks = nnx.List(
            [
                HalvingBlock(2 * width, (4 * width, 4 * width), identity, rngs=rngs),
                HalvingBlock(4 * width, (8 * width, 8 * width), rngs=rngs),
                HalvingBlock(8 * width, (middle, middle), rngs=rngs),
                *(MiddleBlock(middle, rngs=rngs) for _ in range(depth)),
                HalvingBlock(middle, (middle, 32 * width), rngs=rngs),
            ]
        )
        self.conv1 = SeparableConv(32 * width, 48 * width, rngs=rngs)
        self.conv2 = SeparableConv(48 * width, 64 * width, rngs=rngs)
        self.head = nnx.Linear(64 * width, num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = nnx.relu(self.conv1(x))
        x = nnx.relu(self.conv2(x))
        return self.head(jnp.mean(x, axis=(1, 2)))


xception8 = functools.partial(Xception, depth=8)
