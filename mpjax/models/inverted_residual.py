"""Inverted residual blocks, of EfficientNet and MobileNetV3: few channels between blocks and many inside.

Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018 (arXiv:1801.04381); with squeeze and
excitation as in Tan et al., 2018 (arXiv:1807.11626).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.conv_norm import ConvNorm
from mpjax.models.resnet import identity


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class InvertedResidual(nnx.Module):
    """1x1 convolution to more channels, depthwise convolution, squeeze and excitation, 1x1 convolution to few channels.

    No activation follows the last one. If input and output have the same shape, the input is added to it.

    Args:
      channels_in: channels of the input.
      expanded: channels inside; if they are those of the input, there is no first convolution.
      channels_out: channels of the output.
      kernel: height and width of the depthwise convolution.
      stride: the stride of the depthwise convolution.
      activation: the function after the first two convolutions and their norms.
      squeeze: the module after the depthwise convolution, or `identity`.
      drop: the rate at which the block of an example is dropped in training, so that only its input is left.
    """

    def __init__(
        self,
        channels_in: int,
        expanded: int,
        channels_out: int,
        kernel: int,
        stride: int,
        *,
        activation: Callable[[jax.Array], jax.Array],
        squeeze: Callable[[jax.Array], jax.Array],
        drop: float = 0.0,
        rngs: nnx.Rngs,
    ):
        same = expanded == channels_in
        self.expand = identity if same else ConvNorm(channels_in, expanded, activation=activation, rngs=rngs)
        self.depthwise = ConvNorm(expanded, expanded, kernel, stride, groups=expanded, activation=activation, rngs=rngs)
        self.squeeze = squeeze
        self.project = ConvNorm(expanded, channels_out, rngs=rngs)
        self.adds_input = stride == 1 and channels_in == channels_out
        # One random number per example keeps or drops the whole block.
        drops = drop and self.adds_input
        self.drop = nnx.Dropout(drop, broadcast_dims=(1, 2, 3), rngs=rngs) if drops else identity

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B I J D"]:
        y = self.project(self.squeeze(self.depthwise(self.expand(x))))
        return x + self.drop(y) if self.adds_input else y


def in_eights(channels: float) -> int:
    """Rounds a number of channels to the nearest multiple of 8, at least 8, that is not below 90 % of it."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def require_eights(width: int) -> None:
    """Raises UsageError for a width that is not a multiple of 8, since the network would have another one."""
    if width < 8 or width % 8:
        raise UsageError(
            f"the channels of this network are multiples of 8, got a width of {width}; write {in_eights(width)}, on "
            f"the command line --model.width {in_eights(width)}"
        )
