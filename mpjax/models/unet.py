"""U-Net: a convolutional encoder and decoder with skip connections at each resolution, for segmentation.

Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015 (arXiv:1505.04597). As is
usual today, convolutions are padded, so that logits have the image's size, and batch norm follows each 3x3 convolution.

Shapes: B batch, H height, W width, C channels, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.batch_norm import relu_after
from mpjax.models.pooling import max_pool
from mpjax.models.resnet import BatchNorm


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


# Gaussian of variance 2 / fan-in, as in section 3 of the paper; batch norm makes a bias redundant.
Conv = functools.partial(nnx.Conv, kernel_size=(3, 3), use_bias=False, kernel_init=nnx.initializers.he_normal())


class TwoConvs(nnx.Module):
    """Two 3x3 convolutions, each with batch norm and ReLU, at one resolution."""

    def __init__(self, channels_in: int, width: int, *, rngs: nnx.Rngs):
        self.conv1 = Conv(channels_in, width, rngs=rngs)
        self.norm1 = BatchNorm(width, rngs=rngs)
        self.conv2 = Conv(width, width, rngs=rngs)
        self.norm2 = BatchNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = relu_after(self.norm1, self.conv1(x))
        return relu_after(self.norm2, self.conv2(x))


class Up(nnx.Module):
    """Doubles height and width, halves channels, concatenates the encoder's features, and applies two convolutions.

    The doubled features are cropped to the height and width of the encoder's.
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.ConvTranspose(2 * width, width, (2, 2), strides=(2, 2), padding="VALID", rngs=rngs)
        self.convs = TwoConvs(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, shortcut: jax.Array) -> jax.Array:
        height, width = shortcut.shape[1:3]
        x = self.up(x)[:, :height, :width]
        return self.convs(jnp.concatenate([shortcut, x], axis=-1))


class UNet(nnx.Module):
    """An encoder that halves the resolution, a decoder that doubles it again, and a linear classifier for every pixel.

    Any height and width is valid: halving rounds up, so that no row or column is lost, and doubling crops the excess.

    Args:
      channels: channels of the input image.
      num_classes: number of logits per pixel.
      width: channels at full resolution, doubled by each halving.
      depth: the number of times that height and width are halved.
    """

    def __init__(self, *, channels: int, num_classes: int, width: int, depth: int, rngs: nnx.Rngs):
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nnx.List(
            [TwoConvs(before, after, rngs=rngs) for before, after in zip([channels, *widths[:-1]], widths, strict=True)]
        )
        self.up = nnx.List([Up(after, rngs=rngs) for after in reversed(widths[:-1])])
        self.head = nnx.Conv(width, num_classes, (1, 1), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W K"]:
        """Computes the logits of each pixel. H and W may be any; in training, batch norms update their statistics."""
        fine = []
        for convs in list(self.down)[:-1]:
            fine.append(convs(x))
            height, width = x.shape[1:3]
            x = max_pool(fine[-1], 2, stride=2, padding=((0, height % 2), (0, width % 2)))
        x = self.down[-1](x)
        for up, shortcut in zip(self.up, reversed(fine), strict=True):
            x = up(x, shortcut)
        return self.head(x)


unet64 = functools.partial(UNet, width=64, depth=4)
