"""Attention to a source, and the block of a decoder that reads one, shared by T5 and Whisper.

Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762), section 3.2.3.

Shapes: B batch, T positions of the source, U positions of the target, S keys, D width, N heads, H features per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from flax import nnx

from mpjax.models.transformer import dropping
from mpjax.precision.attention import dot_product_attention


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Bool, Float


Pair = tuple[jax.Array, jax.Array]
"""Keys and values, each [B, S, N, H]."""

Source = jax.Array | Pair
"""Features, [B, S, D], or their keys and values."""

Change = Callable[[jax.Array, jax.Array], Pair]
"""`(keys, values) -> (keys, values)`: what a cache makes of them, before attention reads them."""


class SourceAttention(nnx.Module):
    """Attention to the features of a source, or to its keys and values.

    Args:
      query: a layer from features to queries, [B, U, N, H].
      key: a layer from features to keys.
      value: a layer from features to values.
      out: a layer from the mixed values to features.
      scale: the factor of the scores; None: 1 / sqrt(H).
    """

    def __init__(
        self,
        query: nnx.LinearGeneral,
        key: nnx.LinearGeneral,
        value: nnx.LinearGeneral,
        out: nnx.LinearGeneral,
        *,
        scale: float | None = None,
    ):
        self.query = query
        self.key = key
        self.value = value
        self.out = out
        self.scale = scale

    def __call__(
        self,
        x: Float[Array, "B U D"],
        source: Source,
        bias: jax.Array | None,
        mask: jax.Array | None,
        change: Change | None = None,
    ) -> Float[Array, "B U D"]:
        """Maps features to features, by attention to those of a source, or to its keys and values."""
        pair = source if isinstance(source, tuple) else (self.key(source), self.value(source))
        key, value = pair if change is None else change(*pair)
        return self.out(dot_product_attention(self.query(x), key, value, bias=bias, mask=mask, scale=self.scale))


class CrossBlock(nnx.Module):
    """Attention, attention to a source, and an MLP, each behind a norm and with a residual connection around both.

    Args:
      norm: makes a norm, of which there are three.
      attention: makes an attention, of which there are two.
      mlp: makes the MLP.
      dropout: the dropout rate of the three results, in training.
    """

    def __init__(
        self,
        *,
        norm: Callable[[], nnx.Module],
        attention: Callable[[], SourceAttention],
        mlp: Callable[[], nnx.Module],
        dropout: float,
        rngs: nnx.Rngs,
    ):
        self.norm1 = norm()
        self.attention = attention()
        self.cross_norm = norm()
        self.cross = attention()
        self.norm2 = norm()
        self.mlp = mlp()
        self.dropout = dropping(dropout, rngs)

    def __call__(
        self,
        x: Float[Array, "B U D"],
        bias: Float[Array, "B N U S"] | None,
        mask: Bool[Array, "B 1 U S"],
        source: Source,
        there: Bool[Array, "B 1 1 T"] | None,
        change: Change | None = None,
        change_source: Change | None = None,
    ) -> Float[Array, "B U D"]:
        """Maps features to features.

        Args:
          x: the features.
          bias: what is added to the scores of the tokens, in float32 or wider; None: nothing.
          mask: False where a token must not attend to another.
          source: the features of the encoder, or their keys and values.
          there: False where the source has no position; None: it has all.
          change: what becomes of the keys and values of the tokens; None: nothing.
          change_source: what becomes of those of the source.
        """
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, bias, mask, change))
        x = x + self.dropout(self.cross(self.cross_norm(x), source, None, there, change_source))
        return x + self.dropout(self.mlp(self.norm2(x)))
