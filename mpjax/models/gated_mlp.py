"""The gated MLP of Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202).

Shapes: B batch, T positions, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
from flax import nnx

from mpjax.models.activations import gelu_gate, silu_gate, tanh_gelu_gate


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


Gate = Callable[[jax.Array, jax.Array], jax.Array]

GATES: Mapping[str, Gate] = {"silu": silu_gate, "gelu": gelu_gate, "tanh_gelu": tanh_gelu_gate}
"""Functions `(gate, x) -> activation(gate) * x`, by the name of the activation."""


def same(x: jax.Array) -> jax.Array:
    """Returns x, in place of a layer that a network has not."""
    return x


class GatedMLP(nnx.Module):
    """Computes down(dropout(activation(gate(x)) * up(x))).

    Args:
      width: D.
      hidden: the hidden width.
      activation: the name of the activation of the gate, one of `GATES`.
      use_bias: whether the three layers have biases.
      kernel_init: the initializer of the kernels of `gate` and `up`.
      out_init: the initializer of the kernel of `down`.
      dropout: what the hidden features go through in front of `down`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str,
        use_bias: bool,
        kernel_init: Callable,
        out_init: Callable,
        dropout: Callable[[jax.Array], jax.Array] = same,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(nnx.Linear, use_bias=use_bias, rngs=rngs)
        self.gate = linear(width, hidden, kernel_init=kernel_init)
        self.up = linear(width, hidden, kernel_init=kernel_init)
        self.down = linear(hidden, width, kernel_init=out_init)
        self.gated = GATES[activation]
        self.dropout = dropout

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(self.dropout(self.gated(self.gate(x), self.up(x))))
