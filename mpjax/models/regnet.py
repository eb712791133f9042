"""RegNet: residual networks of grouped convolutions, with the depths and widths that a search found.

Radosavovic et al., "Designing Network Design Spaces", 2020 (arXiv:2003.13678): RegNetX, and RegNetY, which has squeeze
and excitation too. The last batch norm of each block starts at zero (Goyal et al., 2017, arXiv:1706.02677).

Shapes: B batch, H height, W width, C channels, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.activations import relu
from mpjax.models.batch_norm import relu_after
from mpjax.models.conv_norm import ConvNorm
from mpjax.models.resnet import BatchNorm, Conv, Shortcut, ZeroBatchNorm, identity
from mpjax.models.squeeze_excitation import SqueezeExcitation


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


Function = Callable[[jax.Array], jax.Array]


class RegNetBlock(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions of the same width, the second in groups of `group` channels, with a shortcut.

    Batch norm follows each convolution; ReLU follows the first two norms and the sum. The 3x3 convolution has the
    stride, and `squeeze`, a module or `identity`, follows its ReLU.
    """

    def __init__(self, channels_in: int, width: int, group: int, stride: int, squeeze: Function, *, rngs: nnx.Rngs):
        self.conv1 = Conv(channels_in, width, (1, 1), rngs=rngs)
        self.norm1 = BatchNorm(width, rngs=rngs)
        self.conv2 = Conv(
            width, width, (3, 3), strides=stride, padding=1, feature_group_count=width // group, rngs=rngs
        )
        self.norm2 = BatchNorm(width, rngs=rngs)
        self.squeeze = squeeze
        self.conv3 = Conv(width, width, (1, 1), rngs=rngs)
        self.norm3 = ZeroBatchNorm(width, rngs=rngs)
        same = stride == 1 and channels_in == width
        self.shortcut = identity if same else Shortcut(channels_in, width, stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = relu_after(self.norm1, self.conv1(x))
        y = self.squeeze(relu_after(self.norm2, self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return relu(y + self.shortcut(x))


def plain(channels: int, channels_in: int, rngs: nnx.Rngs) -> Function:
    """RegNetX has no squeeze and excitation."""
    return identity


def squeezed(channels: int, channels_in: int, rngs: nnx.Rngs) -> Function:
    """RegNetY has squeeze and excitation of all channels, to a quarter of those of the block's input."""
    return SqueezeExcitation(channels, max(1, round(channels_in / 4)), rngs=rngs)


class RegNet(nnx.Module):
    """3x3 convolution of 32 channels, four stages of blocks, mean over the image, linear classifier.

    Args:
      squeeze: makes the module after the 3x3 convolution of a block: `plain` or `squeezed`.
      depths: number of blocks of each stage; each stage halves height and width.
      widths: channels of each stage, multiples of `group`.
      group: channels of a group in the 3x3 convolutions.
      channels: channels of the input image.
      width: channels of the first stage; those of the others are in proportion to it, in multiples of a group. If it is
        less than a group, it is the group. 0: as in `widths`.
      stride: stride of the first convolution; 1 for images of about 64 pixels or less.
      num_classes: number of logits.

    Raises:
      UsageError: `width` is not a multiple of the group.
    """

    def __init__(
        self,
        squeeze: Callable[[int, int, nnx.Rngs], Function],
        depths: tuple[int, ...],
        widths: tuple[int, ...],
        group: int,
        *,
        channels: int,
        width: int = 0,
        stride: int = 2,
        num_classes: int,
        rngs: nnx.Rngs,
    ):
        width = width or widths[0]
        self.stride = stride
        self.depths = depths
        group = min(group, width)
        if width % group:
            raise UsageError(
                f"this RegNet has groups of {group} channels, got a width of {width}; write a multiple, on the command "
                f"line --model.width {max(1, round(width / group)) * group}"
            )
        self.stem = ConvNorm(channels, 32, 3, stride, activation=relu, rngs=rngs)
        blocks = []
        channels_in = 32
        for depth, published in zip(depths, widths, strict=True):
            channels_out = max(1, round(published * width / widths[0] / group)) * group
            for index in range(depth):
                module, stride = squeeze(channels_out, channels_in, rngs), 2 if index == 0 else 1
                blocks.append(RegNetBlock(channels_in, channels_out, group, stride, module, rngs=rngs))
                channels_in = channels_out
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels_in, num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


regnetx = functools.partial(RegNet, plain)
regnety = functools.partial(RegNet, squeezed)

regnetx_004 = functools.partial(regnetx, (1, 2, 7, 12), (32, 64, 160, 384), 16)
regnetx_032 = functools.partial(regnetx, (2, 6, 15, 2), (96, 192, 432, 1008), 48)
regnety_004 = functools.partial(regnety, (1, 3, 6, 6), (48, 104, 208, 440), 8)
regnety_016 = functools.partial(regnety, (2, 6, 17, 2), (48, 120, 336, 888), 24)
regnety_032 = functools.partial(regnety, (2, 5, 13, 1), (72, 216, 576, 1512), 24)
