"""ConvNeXt: a residual network with the sizes of a Vision Transformer and depthwise convolutions for attention.

Liu et al., "A ConvNet for the 2020s", 2022 (arXiv:2201.03545); layer scale from Touvron et al., 2021
(arXiv:2103.17239), stochastic depth from Huang et al., 2016 (arXiv:1603.09382). The blocks of version 2 normalize the
response of each channel in place of the layer scale: Woo et al., "ConvNeXt V2", 2023 (arXiv:2301.00808).

Shapes: B batch, H height, W width, C channels, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.activations import gelu
from mpjax.models.resnet import identity
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


INIT = nnx.initializers.truncated_normal(0.02)
Conv = functools.partial(nnx.Conv, kernel_init=INIT)
Linear = functools.partial(nnx.Linear, kernel_init=INIT)
LayerNorm = functools.partial(nnx.LayerNorm, epsilon=1e-6)


class LayerScale(nnx.Module):
    """Multiplies each channel by a parameter that starts small, so that a block starts close to the identity."""

    def __init__(self, channels: int, initial: float = 1e-6):
        self.scale = nnx.Param(jnp.full((channels,), initial, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        # Broadcast before the cast down: the gradient is a sum over all pixels, which needs more than half precision.
        scale = jnp.broadcast_to(scale.astype(widest(scale.dtype, FLOAT32)), x.shape)
        return x * scale.astype(x.dtype)


class ResponseNorm(nnx.Module):
    """Global response normalization: scales each channel by its norm over the image, relative to all channels'.

    Computes x + scale * x * n / (mean(n) + 1e-6) + bias, where n is the root of the sum of squares of a channel over
    the positions of an image, in float32 or wider; the result has the dtype of x. The gradient of a root of 0 is 0.
    """

    def __init__(self, channels: int):
        self.scale = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32))

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        wide = x.astype(widest(x.dtype, FLOAT32))
        scale, bias = (param[...].astype(wide.dtype)[None, None, None] for param in (self.scale, self.bias))
        squares = jnp.sum(jnp.square(wide), axis=(1, 2), keepdims=True)
        norms = jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))
        norms = norms / (jnp.mean(norms, axis=-1, keepdims=True) + 1e-6)
        return (wide + scale * (wide * norms) + bias).astype(x.dtype)


class ConvNeXtBlock(nnx.Module):
    """A 7x7 depthwise convolution, layer norm, and an MLP across channels, with a shortcut around all of them.

    In training, the block of an example is dropped with probability `drop`, so that only the shortcut is left.
    Blocks of `version` 2 have a `ResponseNorm` in the MLP, those of version 1 a `LayerScale` behind it.
    """

    def __init__(self, width: int, drop: float, *, version: Literal[1, 2] = 1, rngs: nnx.Rngs):
        self.depthwise = Conv(width, width, (7, 7), padding=3, feature_group_count=width, rngs=rngs)
        self.norm = LayerNorm(width, rngs=rngs)
        self.expand = Linear(width, 4 * width, rngs=rngs)
        self.project = Linear(4 * width, width, rngs=rngs)
        self.response = ResponseNorm(4 * width) if version == 2 else identity
        self.scale = LayerScale(width) if version == 1 else identity
        # One random number per example keeps or drops the whole block.
        self.drop = nnx.Dropout(drop, broadcast_dims=(1, 2, 3), rngs=rngs) if drop else identity

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.depthwise(x))
        y = self.project(self.response(gelu(self.expand(y))))
        return x + self.drop(self.scale(y))


class Stem(nnx.Module):
    """Patch embedding: a convolution whose stride equals its kernel size, and layer norm."""

    def __init__(self, channels_in: int, width: int, patch: int, *, rngs: nnx.Rngs):
        self.conv = Conv(channels_in, width, (patch, patch), strides=patch, padding=0, rngs=rngs)
        self.norm = LayerNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class Downsample(nnx.Module):
    """Layer norm and a 2x2 convolution of stride 2: halves height and width, rounded down, doubles the channels."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(width, rngs=rngs)
        self.conv = Conv(width, 2 * width, (2, 2), strides=2, padding=0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(self.norm(x))


class ConvNeXt(nnx.Module):
    """Stem, stages of blocks with downsampling between them, mean over the image, linear classifier.

    Args:
      stages: number of blocks in each stage.
      channels: channels of the input image.
      width: channels of the first stage, doubled by each later stage.
      num_classes: number of logits.
      patch: height and width of the stem's patches; 1 or 2 for images of about 32 pixels or less.
      drop: stochastic depth: the rate at which the last block is dropped in training; it grows linearly from 0 for the
        first block.
      version: 1, or 2 for blocks with a `ResponseNorm`.
      epsilon: epsilon of the last norm; Hugging Face's models have 1e-12.
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
        version: Literal[1, 2] = 1,
        epsilon: float = 1e-6,
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
                layers.append(ConvNeXtBlock(width * 2**stage, drop * index / last, version=version, rngs=rngs))
        self.layers = nnx.List(layers)
        channels_out = width * 2 ** (len(stages) - 1)
        self.norm = LayerNorm(channels_out, epsilon=epsilon, rngs=rngs)
        self.head = Linear(channels_out, num_classes, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images.

        Raises:
          UsageError: the images are so small that the last stage would have no pixels.
        """
        _, height, width, _ = x.shape
        if min(height, width) < self.smallest:
            raise UsageError(
                f"this ConvNeXt needs images of {self.smallest}x{self.smallest} pixels or more, got {height}x{width}; "
                f"build it with a smaller patch (patch=1) or fewer stages"
            )
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(jnp.mean(x, axis=(1, 2))))


convnext_t = functools.partial(ConvNeXt, (3, 3, 9, 3))
