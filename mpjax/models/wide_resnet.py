"""Wide ResNet: residual networks with few layers and many channels, for images of about 32 pixels.

Zagoruyko and Komodakis, "Wide Residual Networks", 2016 (arXiv:1605.07146), with batch norm and ReLU before each
convolution (He et al., 2016, arXiv:1603.05027).

Shapes: B batch, H height, W width, C channels, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.batch_norm import relu_after
from mpjax.models.resnet import BatchNorm, Conv, identity


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class WideBlock(nnx.Module):
    """Two 3x3 convolutions with a shortcut; batch norm and ReLU before each convolution, dropout between the two."""

    def __init__(self, channels_in: int, width: int, stride: int, dropout: float, *, rngs: nnx.Rngs):
        self.norm1 = BatchNorm(channels_in, rngs=rngs)
        self.conv1 = Conv(channels_in, width, (3, 3), strides=stride, padding=1, rngs=rngs)
        self.norm2 = BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else identity
        self.conv2 = Conv(width, width, (3, 3), padding=1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv1(relu_after(self.norm1, x))
        y = self.conv2(self.dropout(relu_after(self.norm2, y)))
        return y + x


class ChangingBlock(WideBlock):
    """A block that changes the shape: its shortcut is a 1x1 convolution after the first batch norm and ReLU."""

    def __init__(self, channels_in: int, width: int, stride: int, dropout: float, *, rngs: nnx.Rngs):
        super().__init__(channels_in, width, stride, dropout, rngs=rngs)
        self.shortcut = Conv(channels_in, width, (1, 1), strides=stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = relu_after(self.norm1, x)
        y = self.conv1(x)
        y = self.conv2(self.dropout(relu_after(self.norm2, y)))
        return y + self.shortcut(x)


class WideResNet(nnx.Module):
    """A 3x3 convolution, three stages of residual blocks, mean over the image, linear classifier.

    Args:
      depth: d in WRN-d-k, which is 6n + 4 with n blocks in each stage.
      widening: k in WRN-d-k, the ratio of the first stage's channels to `width`.
      channels: channels of the input image.
      width: channels of the first convolution, and of the first stage before widening. Each later stage doubles them.
      num_classes: number of logits.
      dropout: dropout rate between the convolutions of a block.

    Raises:
      UsageError: the depth is not 6n + 4.
    """

    def __init__(
        self,
        depth: int,
        widening: int,
        *,
        channels: int,
        width: int = 16,
        num_classes: int,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        if depth < 10 or depth % 6 != 4:
            raise UsageError(f"WideResNet's depth must be 6n + 4 (10, 16, 22, 28, 34, 40), got {depth}")
        self.stem = Conv(channels, width, (3, 3), padding=1, rngs=rngs)
        blocks = []
        channels_in = width
        for stage in range(3):
            channels_out = width * widening * 2**stage
            for index in range((depth - 4) // 6):
                stride = 2 if stage > 0 and index == 0 else 1
                same = stride == 1 and channels_in == channels_out
                block = WideBlock if same else ChangingBlock
                blocks.append(block(channels_in, channels_out, stride, dropout, rngs=rngs))
                channels_in = channels_out
        self.blocks = nnx.List(blocks)
        self.norm = BatchNorm(channels_in, rngs=rngs)
        self.head = nnx.Linear(channels_in, num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = relu_after(self.norm, x)
        return self.head(jnp.mean(x, axis=(1, 2)))


wrn16_4 = functools.partial(WideResNet, 16, 4)
wrn28_10 = functools.partial(WideResNet, 28, 10)
