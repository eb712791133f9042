"""DenseNet: each layer reads the results of all layers before it in its block.

Huang et al., "Densely Connected Convolutional Networks", 2016 (arXiv:1608.06993): DenseNet-BC, with bottlenecks, and
half of the channels between blocks.

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
from mpjax.models.resnet import BatchNorm, Conv, ImageNetStem, SmallStem


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class DenseLayer(nnx.Module):
    """1x1 and 3x3 convolutions, each after batch norm and ReLU, whose result is put behind the channels of the input.

    Args:
      channels_in: channels of the input.
      growth: channels of the result, a quarter of those between the convolutions.
    """

    def __init__(self, channels_in: int, growth: int, *, rngs: nnx.Rngs):
        self.norm1 = BatchNorm(channels_in, rngs=rngs)
        self.conv1 = Conv(channels_in, 4 * growth, (1, 1), rngs=rngs)
        self.norm2 = BatchNorm(4 * growth, rngs=rngs)
        self.conv2 = Conv(4 * growth, growth, (3, 3), padding=1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv1(relu_after(self.norm1, x))
        y = self.conv2(relu_after(self.norm2, y))
        return jnp.concatenate([x, y], axis=-1)


class Transition(nnx.Module):
    """Batch norm, ReLU, a 1x1 convolution to half the channels, and the means of 2x2 pixels.

    An odd last row or column is left out.
    """

    def __init__(self, channels_in: int, *, rngs: nnx.Rngs):
        self.norm = BatchNorm(channels_in, rngs=rngs)
        self.conv = Conv(channels_in, channels_in // 2, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(relu_after(self.norm, x))
        batch, height, width, channels = y.shape
        if min(height, width) < 2:
            raise UsageError(
                f"no pixel is left between two blocks of this DenseNet, whose image is {height}x{width} pixels there; "
                "take larger images, on the command line --data.image_size, or the small stem, --model.stem small"
            )
        pairs = y[:, : height // 2 * 2, : width // 2 * 2].reshape(batch, height // 2, 2, width // 2, 2, channels)
        # A mean is computed in float32; the sum of a pooling would be in half precision.
        return jnp.mean(pairs, axis=(2, 4))


class DenseNet(nnx.Module):
    """Stem, dense blocks with transitions between them, mean over the image, linear classifier.

    Args:
      depths: number of layers of each block.
      stem: `ImageNetStem` or `SmallStem`.
      channels: channels of the input image.
      width: channels of the stem; each layer adds half as many.
      num_classes: number of logits.
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        stem: type[ImageNetStem] | type[SmallStem] = ImageNetStem,
        *,
        channels: int,
        width: int = 64,
        num_classes: int,
        rngs: nnx.Rngs,
    ):
        if width % 2:
            raise UsageError(f"each layer of a DenseNet adds half as many channels as its width: {width} is odd")
        self.stem = stem(channels, width, rngs=rngs)
        self.depths = depths
        layers = []
        channels_in = width
        for index, depth in enumerate(depths):
            if index > 0:
                layers.append(Transition(channels_in, rngs=rngs))
                channels_in //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels_in, width // 2, rngs=rngs))
                channels_in += width // 2
        self.layers = nnx.List(layers)
        self.norm = BatchNorm(channels_in, rngs=rngs)
        self.head = nnx.Linear(channels_in, num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images.

        Raises:
          UsageError: the images are so small that no pixel is left.
        """
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(jnp.mean(relu_after(self.norm, x), axis=(1, 2)))


densenet121 = functools.partial(DenseNet, (6, 12, 24, 16))
