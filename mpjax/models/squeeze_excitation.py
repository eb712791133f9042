"""Squeeze and excitation: each channel is multiplied by a gate that is computed from the means of all channels.

Hu et al., "Squeeze-and-Excitation Networks", 2017 (arXiv:1709.01507).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.activations import relu, sigmoid_gate
from mpjax.models.resnet import Conv


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class SqueezeExcitation(nnx.Module):
    """Multiplies each channel by a gate between 0 and 1: two 1x1 convolutions of the channels' means.

    Means and gates are computed in float32 or wider.

    Args:
      channels: channels of the input and of the output.
      squeezed: channels between the two convolutions.
      activation: the function between them.
      gate: computes the output from the result of the second convolution, [B, 1, 1, C], and the input.
    """

    def __init__(
        self,
        channels: int,
        squeezed: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = relu,
        gate: Callable[[jax.Array, jax.Array], jax.Array] = sigmoid_gate,
        rngs: nnx.Rngs,
    ):
        self.reduce = Conv(channels, squeezed, (1, 1), use_bias=True, rngs=rngs)
        self.expand = Conv(squeezed, channels, (1, 1), use_bias=True, rngs=rngs)
        self.activation = activation
        self.gate = gate

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        means = jnp.mean(x, axis=(1, 2), keepdims=True)
        return self.gate(self.expand(self.activation(self.reduce(means))), x)
