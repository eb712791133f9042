"""ConvNeXt: a residual network with a Vision Transformer's sizes, depthwise convolutions in place of attention.

Liu et al., "A ConvNet for the 2020s", 2022 (arXiv:2201.03545); layer scale from Touvron et al., 2021
(arXiv:2103.17239), stochastic depth from Huang et al., 2016 (arXiv:1603.09382).

Shapes: B batch, H height, W width, C channels; images are B H W C.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.activations import gelu
from mpjax.models.resnet import identity
from mpjax.precision.dtypes import FLOAT32, widest


INIT = nnx.initializers.truncated_normal(0.02)
Conv = functools.partial(nnx.Conv, kernel_init=INIT)
Linear = functools.partial(nnx.Linear, kernel_init=INIT)
LayerNorm = functools.partial(nnx.LayerNorm, epsilon=1e-6)


class LayerScale(nnx.Module):
    """Multiplies each channel by a parameter, small at first, so that a block starts close to its shortcut."""

    def __init__(self, channels: int, initial: float = 1e-6):
        self.scale = nnx.Param(jnp.full((channels,), initial, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        # Spread out before it is cast down: its gradient is a sum over all pixels, which half precision cannot hold.
        scale = jnp.broadcast_to(scale.astype(widest(scale.dtype, FLOAT32)), x.shape)
        return x * scale.astype(x.dtype)


class Block(nnx.Module):
    """A 7x7 convolution of each channel on its own, then a perceptron across channels, around a shortcut."""

    def __init__(self, width: int, drop: float, *, rngs: nnx.Rngs):
        self.depthwise = Conv(width, width, (7, 7), padding=3, feature_group_count=width, rngs=rngs)
        self.norm = LayerNorm(width, rngs=rngs)
        self.expand = Linear(width, 4 * width, rngs=rngs)
        self.project = Linear(4 * width, width, rngs=rngs)
        self.scale = LayerScale(width)
        # One random number for an example: it keeps or drops the whole block.
        self.drop = nnx.Dropout(drop, broadcast_dims=(1, 2, 3), rngs=rngs) if drop else identity

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.depthwise(x))
        y = self.project(gelu(self.expand(y)))
        return x + self.drop(self.scale(y))


class Stem(nnx.Module):
    """Cuts the image into patches and gives each one vector: a convolution whose stride is its size."""

    def __init__(self, channels_in: int, width: int, patch: int, *, rngs: nnx.Rngs):
        self.conv = Conv(channels_in, width, (patch, patch), strides=patch, padding=0, rngs=rngs)
        self.norm = LayerNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class Downsample(nnx.Module):
    """Halves height and width between stages, and doubles the channels."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(width, rngs=rngs)
        self.conv = Conv(width, 2 * width, (2, 2), strides=2, padding=0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(self.norm(x))


class ConvNeXt(nnx.Module):
    """Stem, stages of blocks with a halving between them, mean over the image, linear classifier.

    Args:
      stages: number of blocks in each stage.
      channels: channels of the input image.
      width: channels of the first stage, doubled by each later one.
      num_classes: number of logits.
      patch: height and width of the stem's patches; 1 or 2 for images of some 32 pixels and less.
      drop: how often the last block is dropped while training; less for earlier ones, down to never for the first.
    """

    def __init__(
        self,
        stages: tuple[int, ...],
        *,
        channels: int,
        width: int = 96,
        num_classes: int,
        patch: int = 4,
        drop: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.smallest = patch * 2 ** (len(stages) - 1)
        self.stem = Stem(channels, width, patch, rngs=rngs)
        layers = []
        last = max(sum(stages) - 1, 1)
        for stage in range(len(stages)):
            if stage > 0:
                layers.append(Downsample(width * 2 ** (stage - 1), rngs=rngs))
            for index in range(sum(stages[:stage]), sum(stages[: stage + 1])):
                layers.append(Block(width * 2**stage, drop * index / last, rngs=rngs))
        self.layers = nnx.List(layers)
        channels_out = width * 2 ** (len(stages) - 1)
        self.norm = LayerNorm(channels_out, rngs=rngs)
        self.head = Linear(channels_out, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images [B, H, W, C] to logits [B, num_classes].

        Raises:
          UsageError: images of which the last stage would have no pixel left.
        """
        _, height, width, _ = x.shape
        if min(height, width) < self.smallest:
            raise UsageError(
                f"this ConvNeXt takes images of {self.smallest} pixels or more, got {height}x{width}; "
                f"make it with a smaller patch (patch=1) or fewer stages"
            )
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(jnp.mean(x, axis=(1, 2))))


convnext_t = functools.partial(ConvNeXt, (3, 3, 9, 3))
