"""U-Net with a time embedding, for diffusion: residual blocks that the time and the label scale and shift.

Ho et al., "Denoising Diffusion Probabilistic Models", 2020 (arXiv:2006.11239), with the blocks of Nichol & Dhariwal,
"Improved Denoising Diffusion Probabilistic Models", 2021 (arXiv:2102.09672): group norm, SiLU, scale and shift by the
condition, and attention at low resolutions.

Shapes: B batch, H height, W width, C channels, D width of the condition; images are B H W C.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx

from mpjax.models.activations import silu
from mpjax.models.attention import Attention
from mpjax.models.diffusion.conditioning import Condition, modulated
from mpjax.models.transformer import dropping
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


ATTENDED = 16
"""Largest side in pixels at which positions attend to each other."""

BLOCKS = 2
"""Residual blocks at each resolution of the way down; the way up has one more."""

HEAD = 64
"""Channels of an attention head, unless their number is set."""

INIT = nnx.initializers.variance_scaling(1.0, "fan_avg", "uniform")
ZEROS = nnx.initializers.zeros

# Padded by a pixel on each side, for a stride of 2 too: "SAME" would pad an even side at its end alone.
Conv3 = functools.partial(nnx.Conv, kernel_size=(3, 3), padding=1, kernel_init=INIT)


def group_norm(channels: int, *, rngs: nnx.Rngs) -> nnx.GroupNorm:
    """Makes a norm over groups of channels: 32 of them, or as many as divide both 32 and the channels."""
    return nnx.GroupNorm(channels, num_groups=math.gcd(32, channels), epsilon=1e-5, rngs=rngs)


class ConditionedBlock(nnx.Module):
    """Two 3x3 convolutions, each behind a group norm and SiLU, the second norm scaled and shifted; and a shortcut.

    The second convolution is zero at first.
    """

    def __init__(self, channels_in: int, channels: int, condition: int, dropout: float, *, rngs: nnx.Rngs):
        self.norm1 = group_norm(channels_in, rngs=rngs)
        self.conv1 = Conv3(channels_in, channels, rngs=rngs)
        self.modulation = nnx.Linear(condition, 2 * channels, kernel_init=INIT, rngs=rngs)
        self.norm2 = group_norm(channels, rngs=rngs)
        self.dropout = dropping(dropout, rngs)
        self.conv2 = Conv3(channels, channels, kernel_init=ZEROS, rngs=rngs)
        changes = channels_in != channels
        self.shortcut = nnx.Conv(channels_in, channels, (1, 1), kernel_init=INIT, rngs=rngs) if changes else None

    def __call__(self, x: Float[Array, "B H W C"], condition: Float[Array, "B D"]) -> Float[Array, "B H W _"]:
        scale, shift = jnp.split(self.modulation(condition), 2, axis=-1)
        change = modulated(self.norm2(self.conv1(silu(self.norm1(x)))), shift, scale)
        change = self.conv2(self.dropout(silu(change)))
        return (x if self.shortcut is None else self.shortcut(x)) + change


class PixelAttention(nnx.Module):
    """Attention of all pixels to each other behind a group norm, added to its input; its output is zero at first."""

    def __init__(self, channels: int, heads: int, *, rngs: nnx.Rngs):
        self.norm = group_norm(channels, rngs=rngs)
        count = heads or max(channels // HEAD, 1)
        self.attention = Attention(channels, count, kernel_init=INIT, out_init=ZEROS, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        pixels = self.norm(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + self.attention(pixels).reshape(x.shape)


class UNetLayer(nnx.Module):
    """A residual block, with attention behind it at low resolutions."""

    def __init__(self, block: ConditionedBlock, attention: PixelAttention | None):
        self.block = block
        self.attention = attention

    def __call__(self, x: Float[Array, "B H W C"], condition: Float[Array, "B D"]) -> Float[Array, "B H W _"]:
        x = self.block(x, condition)
        return x if self.attention is None else self.attention(x)


class Halving(nnx.Module):
    """Halves height and width, rounded up, by a 3x3 convolution of stride 2."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.conv = Conv3(channels, channels, strides=2, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"], condition: Float[Array, "B D"]) -> Float[Array, "B _ _ C"]:
        del condition
        return self.conv(x)


class Doubling(nnx.Module):
    """Repeats each pixel in both directions, cuts the image to a size, and applies a 3x3 convolution."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.conv = Conv3(channels, channels, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"], rows: int, columns: int) -> Float[Array, "B _ _ C"]:
        wide = x.astype(widest(x.dtype, FLOAT32))  # the gradient of a pixel is a sum of four
        doubled = jnp.repeat(jnp.repeat(wide, 2, axis=1), 2, axis=2).astype(x.dtype)
        return self.conv(doubled[:, :rows, :columns])


class DiffusionUNet(nnx.Module):
    """Residual blocks at several resolutions, down and up again, where each reads what its counterpart had.

    Args:
      image_shape: height, width and channels of an image.
      num_classes: the number of classes; 0: no labels.
      width: channels of the first resolution, an even number; all others have twice as many.
      depth: number of halvings.
      heads: attention heads; 0: one for every `HEAD` channels.
      dropout: dropout rate in residual blocks.
    """

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        rngs: nnx.Rngs,
        width: int = 128,
        depth: int = 3,
        heads: int = 0,
        dropout: float = 0.0,
    ):
        rows, columns, channels = image_shape
        side, wide = max(rows, columns), 2 * width
        self.condition = Condition(width, 4 * width, num_classes, rngs=rngs)
        self.stem = Conv3(channels, width, rngs=rngs)

        def layer(channels_in: int, channels: int, level: int, *, attends: bool = True) -> UNetLayer:
            block = ConditionedBlock(channels_in, channels, 4 * width, dropout, rngs=rngs)
            low = attends and math.ceil(side / 2**level) <= ATTENDED
            return UNetLayer(block, PixelAttention(channels, heads, rngs=rngs) if low else None)

        down, kept, now = [], [width], width
        for level in range(depth + 1):
            for _ in range(BLOCKS):
                down.append(layer(now, now := wide if level else width, level))
                kept.append(now)
            if level < depth:
                down.append(Halving(now, rngs=rngs))
                kept.append(now)
        self.down = nnx.List(down)
        block = ConditionedBlock(now, now, 4 * width, dropout, rngs=rngs)
        first = UNetLayer(block, PixelAttention(now, heads, rngs=rngs))
        self.middle = nnx.List([first, layer(now, now, depth, attends=False)])
        up = []
        for level in range(depth, -1, -1):
            for _ in range(BLOCKS + 1):
                up.append(layer(now + kept.pop(), now := wide if level else width, level))
            if level:
                up.append(Doubling(now, rngs=rngs))
        self.up = nnx.List(up)
        self.norm = group_norm(now, rngs=rngs)
        self.head = Conv3(now, channels, kernel_init=ZEROS, rngs=rngs)

    def __call__(
        self, images: Float[Array, "B H W C"], times: Int[Array, " B"], labels: Int[Array, " B"] | None = None
    ) -> Float[Array, "B H W C"]:
        """Computes the prediction for noisy images at their times; the label K stands for none of K classes."""
        condition = self.condition(times, labels)
        x = self.stem(images)
        kept = [x]
        for layer in self.down:
            x = layer(x, condition)
            kept.append(x)
        for layer in self.middle:
            x = layer(x, condition)
        for layer in self.up:
            if isinstance(layer, Doubling):
                x = layer(x, *kept[-1].shape[1:3])
            else:
                x = layer(jnp.concatenate([x, kept.pop()], axis=-1), condition)
        return self.head(silu(self.norm(x)))


unet_ddpm = DiffusionUNet
