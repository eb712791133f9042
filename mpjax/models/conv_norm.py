"""A convolution, batch norm and an activation: the layer of EfficientNet and MobileNetV3, and the stem of RegNet."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from mpjax.models.resnet import BatchNorm, Conv, identity


class ConvNorm(nnx.Module):
    """A convolution without a bias, batch norm, and an activation (`identity`: none).

    A side of n pixels becomes n / stride, rounded up: the padding is half a kernel on each side, as in PyTorch.
    TensorFlow's "SAME" pads one pixel less in front of an even side, if the stride is 2.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int = 1,
        stride: int = 1,
        *,
        groups: int = 1,
        activation: Callable[[jax.Array], jax.Array] = identity,
        rngs: nnx.Rngs,
    ):
        # The fan-out of a depthwise convolution, counted per group, is its fan-in.
        fan = "fan_in" if groups == channels_in else "fan_out"
        self.conv = Conv(
            channels_in,
            channels_out,
            (kernel, kernel),
            strides=stride,
            padding=kernel // 2,
            feature_group_count=groups,
            kernel_init=nnx.initializers.variance_scaling(2.0, fan, "truncated_normal"),
            rngs=rngs,
        )
        self.norm = BatchNorm(channels_out, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.norm(self.conv(x)))
