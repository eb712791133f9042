"""The Transformer block, shared by BERT, GPT-2 and ViT: attention and an MLP, each with a residual connection.

Shapes: B batch, T positions, L positions in a table, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from mpjax.errors import UsageError
from mpjax.models.activations import activated, gelu
from mpjax.models.attention import Attend, Attention, Implementation
from mpjax.models.residual import with_cast_bias
from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.precision.float8.layers import scaled_by_largest_of


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


Function = Callable[[jax.Array], jax.Array]
Order = Callable[[jax.Array, Any, Function], jax.Array]
"""Where a norm stands among a layer and its residual connection: `(x, norm, change) -> result`."""

NormKernel = Literal["xla", "pallas"]

INIT = nnx.initializers.truncated_normal(0.02)


def pre_norm(x: jax.Array, norm: Function, change: Function) -> jax.Array:
    """Computes x + change(norm(x)), so that the gradient has a direct path (Xiong et al., 2020, arXiv:2002.04745)."""
    return x + change(norm(x))


def pre_norm_by(kernel: NormKernel) -> Order:
    """Chooses the function `(x, norm, change) -> x + change(norm(x))` by the kernel of its backward pass.

    "xla" is `pre_norm`, "pallas" is `mpjax.models.layer_norm.pre_norm`, which runs one kernel of mpjax on NVIDIA GPUs.

    Raises:
      UsageError: `kernel` is unknown.
    """
    if kernel == "xla":
        return pre_norm
    if kernel != "pallas":
        raise UsageError(f"unknown kernel of norms '{kernel}': wanted 'xla' or 'pallas'")
    from mpjax.models import layer_norm  # local, because few models have it

    return layer_norm.pre_norm


def post_norm(x: jax.Array, norm: Function, change: Function) -> jax.Array:
    """Computes norm(x + change(x)), as in the original Transformer and in BERT."""
    return norm(x + change(x))


class MLP(nnx.Module):
    """Two linear layers, from `width` to `hidden` and back, with an activation between them."""

    def __init__(self, width: int, hidden: int, activation: Function, *, kernel_init, out_init, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, hidden, kernel_init=kernel_init, rngs=rngs)
        self.down = nnx.Linear(hidden, width, kernel_init=out_init, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = activated(self.up, self.activation, x)
        return scaled_by_largest_of(with_cast_bias(self.down), activations=hidden.again)(hidden.value)


def dropping(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Makes a dropout layer; with a `rate` of 0 it holds no random stream, and `rngs` is not read."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


class Block(nnx.Module):
    """Attention and an MLP, each with a residual connection.

    Dropout applies to both outputs, not to the attention weights: the fused attention kernel does not support it.

    Args:
      width: D.
      heads: number of attention heads, a divisor of the width.
      order: `pre_norm`, `pre_norm_by(...)` or `post_norm`.
      hidden: the hidden width of the MLP; None: 4 D.
      activation: activation of the MLP.
      epsilon: epsilon of the layer norms.
      is_causal: whether a position attends only to itself and earlier positions.
      dropout: the fraction of values that dropout sets to zero in training.
      implementation: attention implementation; see `attend`.
      unbiased: the projections of attention that have no bias; see `Attention`.
      kernel_init: initializer of the kernels.
      out_init: initializer of the two kernels whose output is added to the residual.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int | None = None,
        order: Order = pre_norm,
        activation: Function = gelu,
        epsilon: float = 1e-6,
        is_causal: bool = False,
        dropout: float = 0.0,
        implementation: Implementation = "auto",
        unbiased: Collection[str] = (),
        kernel_init: Callable = INIT,
        out_init: Callable = INIT,
        rngs: nnx.Rngs,
    ):
        inits = {"kernel_init": kernel_init, "out_init": out_init}
        self.norm1 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(
            width, heads, is_causal=is_causal, implementation=implementation, unbiased=unbiased, **inits, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.mlp = MLP(width, hidden or 4 * width, activation, **inits, rngs=rngs)
        self.dropout = dropping(dropout, rngs)
        self.order = order

    def __call__(
        self, x: Float[Array, "B T D"], lengths: Int[Array, " B"] | None = None, attends: Attend | None = None
    ) -> Float[Array, "B T D"]:
        """Maps features to features; no position attends to those of sequence b from `lengths[b]` on (None: to all).

        `attends` takes the place of `mpjax.models.attention.attend`.
        """
        x = self.order(x, self.norm1, lambda x: self.dropout(self.attention(x, lengths, attends)))
        return self.order(x, self.norm2, lambda x: self.dropout(self.mlp(x)))


def with_positions(x: Float[Array, "B T D"], table: Float[Array, "L D"]) -> Float[Array, "B T D"]:
    """Adds the first T of the L position embeddings of a table to features, in the dtype of the features.

    They are broadcast over the batch before the cast, so that their gradients accumulate in float32.
    """
    return _added(x, jnp.broadcast_to(table[: x.shape[1]].astype(widest(table.dtype, FLOAT32)), x.shape))


def with_positions_at(
    positions: Int[Array, "B T"], x: Float[Array, "B T D"], table: Float[Array, "L D"]
) -> Float[Array, "B T D"]:
    """Adds the position embeddings of other positions than 0 to T - 1, as `with_positions` does."""
    wide = jnp.asarray(table).astype(widest(table.dtype, FLOAT32))  # an exported program has tables of NumPy
    return _added(x, wide[positions])


class WholeTexts:
    """What a language model holds as `context`: it is called with all positions of a text.

    `mpjax.models.context.PartsOfTexts` takes its place where a mesh divides positions.
    """

    parts = 1

    def places(self, length: int) -> Int[Array, " T"]:
        """The positions of `length` tokens in their texts, int32."""
        return jnp.arange(length, dtype=jnp.int32)

    def rows(self, table: Float[Array, "L D"], length: int) -> Float[Array, "_ D"]:
        """The rows of a table of positions that begin with those of `length` tokens."""
        del length
        return table

    def own(self, whole: jax.Array) -> jax.Array:
        """The positions that the model is called with, of an array [B, S, ...] of whole texts."""
        return whole

    def whole(self, tokens: Int[Array, "B T"]) -> Int[Array, "B S"]:
        """The tokens of the whole texts of which the model is called with some."""
        return tokens

    @overload
    def attend(self, attends: Attend) -> Attend: ...

    @overload
    def attend(self, attends: None) -> Attend | None: ...

    def attend(self, attends: Attend | None) -> Attend | None:
        """The function of attention for these positions; `attends` is that of whole texts, None the plain one."""
        return attends


def context_of(model: Any) -> WholeTexts:
    """The positions that a language model is called with: its `context`; all, if it has none."""
    context = getattr(model, "context", None)
    return context if isinstance(context, WholeTexts) else WholeTexts()


def _added(x: jax.Array, rows: jax.Array) -> jax.Array:
    # Without this layout, XLA on GPUs keeps the batch innermost from here on, and transposes for every product.
    return with_layout_constraint(x + rows.astype(x.dtype), Layout(tuple(range(x.ndim))))


def check_length(tokens: Int[Array, "B T"], most: int) -> None:
    """Raises UsageError if the texts have more tokens, padding included, than `most`, the largest length of a model."""
    if tokens.shape[1] > most:
        length = tokens.shape[1]
        raise UsageError(
            f"texts of {length} tokens, but the model takes at most {most}: cut them, or write length={length}"
        )
