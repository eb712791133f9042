"""What all Transformers here share: the block of attention and a two-layer network, each around a shortcut.

Shapes: B batch, T positions, D width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.activations import gelu
from mpjax.models.attention import Attention, Implementation
from mpjax.precision.dtypes import FLOAT32, widest


Function = Callable[[jax.Array], jax.Array]

INIT = nnx.initializers.truncated_normal(0.02)


def pre_norm(x: jax.Array, norm: Function, change: Function) -> jax.Array:
    """The norm before the change: a straight path for the gradient (Xiong et al., 2020, arXiv:2002.04745)."""
    return x + change(norm(x))


def post_norm(x: jax.Array, norm: Function, change: Function) -> jax.Array:
    """The norm behind the sum, as in the first Transformer and in BERT."""
    return norm(x + change(x))


class MLP(nnx.Module):
    """Two linear layers and what stands between them."""

    def __init__(self, width: int, hidden: int, activation: Function, *, kernel_init, out_init, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, hidden, kernel_init=kernel_init, rngs=rngs)
        self.down = nnx.Linear(hidden, width, kernel_init=out_init, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(x)))


def dropping(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """A dropout layer that holds a random stream only if it drops something."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


class Block(nnx.Module):
    """Attention and a two-layer network.

    Dropout is on what each of them adds, not on the weights of the attention: a fused kernel has no place for it.

    Args:
      width: D.
      heads: heads of the attention.
      order: `pre_norm` or `post_norm`.
      activation: between the two linear layers, whose inner width is 4 D.
      epsilon: of the layer norms.
      is_causal: whether a position attends to those up to its own only.
      dropout: share of values set to zero in training.
      implementation: of the attention.
      kernel_init: initial kernels.
      out_init: initial kernels of the two layers whose output is added to the shortcut.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        order: Callable[[jax.Array, Function, Function], jax.Array] = pre_norm,
        activation: Function = gelu,
        epsilon: float = 1e-6,
        is_causal: bool = False,
        dropout: float = 0.0,
        implementation: Implementation = "auto",
        kernel_init: Callable = INIT,
        out_init: Callable = INIT,
        rngs: nnx.Rngs,
    ):
        inits = {"kernel_init": kernel_init, "out_init": out_init}
        self.norm1 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(width, heads, is_causal=is_causal, implementation=implementation, **inits, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.mlp = MLP(width, 4 * width, activation, **inits, rngs=rngs)
        self.dropout = dropping(dropout, rngs)
        self.order = order

    def __call__(self, x: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Features [B, T, D] to as many; of sequence b the positions from `lengths[b]` on are not attended to."""
        x = self.order(x, self.norm1, lambda x: self.dropout(self.attention(x, lengths)))
        return self.order(x, self.norm2, lambda x: self.dropout(self.mlp(x)))


def with_positions(x: jax.Array, table: jax.Array) -> jax.Array:
    """Features [B, T, D] plus the first T rows of a table of position embeddings, in the dtype of the features.

    The rows are spread over the batch before they are cast, so that their gradients add up in float32.
    """
    rows = jnp.broadcast_to(table[: x.shape[1]].astype(widest(table.dtype, FLOAT32)), x.shape)
    return x + rows.astype(x.dtype)


def check_length(tokens: jax.Array, most: int) -> None:
    """Raises UsageError for texts [B, T] of more tokens than there are position embeddings."""
    if tokens.shape[1] > most:
        given = tokens.shape[1]
        raise UsageError(f"texts of {given} tokens for a model of {most} at most: cut them, or write length={given}")
