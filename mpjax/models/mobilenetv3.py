"""MobileNetV3: inverted residual blocks with ReLU, then hard swish, some with squeeze and excitation.

Howard et al., "Searching for MobileNetV3", 2019 (arXiv:1905.02244), with the paddings and batch norms of its PyTorch
implementations in timm.

Shapes: B batch, H height, W width, C channels, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.activations import hard_sigmoid_gate, hard_swish, relu
from mpjax.models.conv_norm import ConvNorm
from mpjax.models.inverted_residual import InvertedResidual, in_eights, require_eights
from mpjax.models.resnet import Conv, identity
from mpjax.models.squeeze_excitation import SqueezeExcitation


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class Bneck(NamedTuple):
    """One block, a row in a table of the paper; numbers of channels are those where `width` is 16.

    Attributes:
      kernel: height and width of the depthwise convolution.
      expanded: channels inside the block.
      channels: channels of the output.
      squeeze: makes the module after the depthwise convolution, from its channels.
      activation: the activation of the block.
      stride: the stride of the depthwise convolution.
    """

    kernel: int
    expanded: int
    channels: int
    squeeze: Callable[..., Callable[[jax.Array], jax.Array]]
    activation: Callable[[jax.Array], jax.Array]
    stride: int


def squeezed(channels: int, rngs: nnx.Rngs) -> SqueezeExcitation:
    """Squeeze and excitation to a quarter of the channels, by a hard sigmoid."""
    return SqueezeExcitation(channels, in_eights(channels / 4), gate=hard_sigmoid_gate, rngs=rngs)


def plain(channels: int, rngs: nnx.Rngs) -> Callable[[jax.Array], jax.Array]:
    """No squeeze and excitation."""
    return identity


LARGE_STAGES = (
    (Bneck(3, 16, 16, plain, relu, 1),),
    (Bneck(3, 64, 24, plain, relu, 2), Bneck(3, 72, 24, plain, relu, 1)),
    (Bneck(5, 72, 40, squeezed, relu, 2), Bneck(5, 120, 40, squeezed, relu, 1), Bneck(5, 120, 40, squeezed, relu, 1)),
    (
        Bneck(3, 240, 80, plain, hard_swish, 2),
        Bneck(3, 200, 80, plain, hard_swish, 1),
        Bneck(3, 184, 80, plain, hard_swish, 1),
        Bneck(3, 184, 80, plain, hard_swish, 1),
    ),
    (Bneck(3, 480, 112, squeezed, hard_swish, 1), Bneck(3, 672, 112, squeezed, hard_swish, 1)),
    (
        Bneck(5, 672, 160, squeezed, hard_swish, 2),
        Bneck(5, 960, 160, squeezed, hard_swish, 1),
        Bneck(5, 960, 160, squeezed, hard_swish, 1),
    ),
)
"""Table 1 of the paper, one tuple for each number of channels."""

SMALL_STAGES = (
    (Bneck(3, 16, 16, squeezed, relu, 2),),
    (Bneck(3, 72, 24, plain, relu, 2), Bneck(3, 88, 24, plain, relu, 1)),
    (
        Bneck(5, 96, 40, squeezed, hard_swish, 2),
        Bneck(5, 240, 40, squeezed, hard_swish, 1),
        Bneck(5, 240, 40, squeezed, hard_swish, 1),
    ),
    (Bneck(5, 120, 48, squeezed, hard_swish, 1), Bneck(5, 144, 48, squeezed, hard_swish, 1)),
    (
        Bneck(5, 288, 96, squeezed, hard_swish, 2),
        Bneck(5, 576, 96, squeezed, hard_swish, 1),
        Bneck(5, 576, 96, squeezed, hard_swish, 1),
    ),
)
"""Table 2 of the paper."""


class MobileNetV3(nnx.Module):
    """3x3 convolution, blocks, 1x1 convolution, mean over the image, a hidden layer, linear classifier.

    Args:
      stages: the rows of each stage.
      hidden: outputs of the hidden layer, where `width` is 16.
      channels: channels of the input image.
      width: channels of the first convolution; all others are in proportion to it, in multiples of 8.
      stride: stride of the first convolution; 1 for images of about 64 pixels or less.
      num_classes: number of logits.
      dropout: dropout rate before the classifier.

    Raises:
      UsageError: `width` is not a multiple of 8.
    """

    def __init__(
        self,
        stages: tuple[tuple[Bneck, ...], ...],
        hidden: int,
        *,
        channels: int,
        width: int = 16,
        stride: int = 2,
        num_classes: int,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        require_eights(width)
        wider = width / 16
        self.stride = stride
        self.depths = tuple(map(len, stages))
        channels_in = width
        self.stem = ConvNorm(channels, channels_in, 3, stride, activation=hard_swish, rngs=rngs)
        blocks = []
        for row in (row for stage in stages for row in stage):
            expanded, channels_out = in_eights(row.expanded * wider), in_eights(row.channels * wider)
            block = InvertedResidual(
                channels_in,
                expanded,
                channels_out,
                row.kernel,
                row.stride,
                activation=row.activation,
                squeeze=row.squeeze(expanded, rngs),
                rngs=rngs,
            )
            blocks.append(block)
            channels_in = channels_out
        self.blocks = nnx.List(blocks)
        features = in_eights(6 * stages[-1][-1].channels * wider)
        self.last = ConvNorm(channels_in, features, activation=hard_swish, rngs=rngs)
        hidden = in_eights(hidden * wider)
        self.hidden = Conv(features, hidden, (1, 1), use_bias=True, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else identity
        self.head = nnx.Linear(hidden, num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        means = jnp.mean(self.last(x), axis=(1, 2), keepdims=True)
        features = hard_swish(self.hidden(means))
        return self.head(self.dropout(features[:, 0, 0]))


mobilenetv3_large = functools.partial(MobileNetV3, LARGE_STAGES, 1280)
mobilenetv3_small = functools.partial(MobileNetV3, SMALL_STAGES, 1024)
