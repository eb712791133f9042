"""EfficientNet: inverted residual blocks with squeeze and excitation; deeper and wider from B0 to B4.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019 (arXiv:1905.11946), with
the paddings and batch norms of its PyTorch implementations.

Shapes: B batch, H height, W width, C channels, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from flax import nnx

from mpjax.models.activations import silu
from mpjax.models.conv_norm import ConvNorm
from mpjax.models.inverted_residual import InvertedResidual, in_eights, require_eights
from mpjax.models.resnet import identity
from mpjax.models.squeeze_excitation import SqueezeExcitation


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class Stage(NamedTuple):
    """Blocks of the same shape.

    Attributes:
      expansion: the ratio of the channels inside a block to those of its input.
      channels: channels of the output, where `width` is 32.
      depth: number of blocks.
      stride: stride of the first block.
      kernel: height and width of the depthwise convolutions.
    """

    expansion: int
    channels: int
    depth: int
    stride: int
    kernel: int


B0_STAGES = (
    Stage(1, 16, 1, 1, 3),
    Stage(6, 24, 2, 2, 3),
    Stage(6, 40, 2, 2, 5),
    Stage(6, 80, 3, 2, 3),
    Stage(6, 112, 3, 1, 5),
    Stage(6, 192, 4, 2, 5),
    Stage(6, 320, 1, 1, 3),
)
"""Table 1 of the paper."""


class EfficientNet(nnx.Module):
    """3x3 convolution, stages of blocks, 1x1 convolution, mean over the image, linear classifier.

    Args:
      wider: the factor of all numbers of channels, which are rounded to multiples of 8.
      deeper: the factor of the number of blocks of each stage, which is rounded up.
      stages: the stages before these factors.
      channels: channels of the input image.
      width: channels of the first convolution, before the factor; all others are in proportion to it.
      stride: stride of the first convolution; 1 for images of about 64 pixels or less.
      num_classes: number of logits.
      dropout: dropout rate before the classifier.
      drop: stochastic depth: the rate at which blocks are dropped in training grows linearly with their index, from 0
        for the first block; it would be `drop` for a block behind the last.

    Raises:
      UsageError: `width` is not a multiple of 8.
    """

    def __init__(
        self,
        wider: float = 1.0,
        deeper: float = 1.0,
        stages: tuple[Stage, ...] = B0_STAGES,
        *,
        channels: int,
        width: int = 32,
        stride: int = 2,
        num_classes: int,
        dropout: float = 0.0,
        drop: float = 0.0,
        rngs: nnx.Rngs,
    ):
        require_eights(width)
        wider = wider * width / 32
        self.stride = stride
        self.depths = tuple(math.ceil(deeper * stage.depth) for stage in stages)
        channels_in = in_eights(32 * wider)
        self.stem = ConvNorm(channels, channels_in, 3, stride, activation=silu, rngs=rngs)
        blocks = []
        for stage, depth in zip(stages, self.depths, strict=True):
            channels_out = in_eights(stage.channels * wider)
            for index in range(depth):
                expanded = stage.expansion * channels_in
                squeeze = SqueezeExcitation(expanded, max(1, round(channels_in / 4)), activation=silu, rngs=rngs)
                block = InvertedResidual(
                    channels_in,
                    expanded,
                    channels_out,
                    stage.kernel,
                    stage.stride if index == 0 else 1,
                    activation=silu,
                    squeeze=squeeze,
                    drop=drop * len(blocks) / sum(self.depths),
                    rngs=rngs,
                )
                blocks.append(block)
                channels_in = channels_out
        self.blocks = nnx.List(blocks)
        features = in_eights(1280 * wider)
        self.last = ConvNorm(channels_in, features, activation=silu, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else identity
        self.head = nnx.Linear(features, num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(jnp.mean(self.last(x), axis=(1, 2))))


efficientnet_b0 = functools.partial(EfficientNet, 1.0, 1.0)
efficientnet_b1 = functools.partial(EfficientNet, 1.0, 1.1)
efficientnet_b2 = functools.partial(EfficientNet, 1.1, 1.2)
efficientnet_b3 = functools.partial(EfficientNet, 1.2, 1.4)
efficientnet_b4 = functools.partial(EfficientNet, 1.4, 1.8)
