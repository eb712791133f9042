"""BERT: a bidirectional text encoder with a classifier on its first token.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018 (arXiv:1810.04805).

Shapes: B batch, T tokens, D width, K classes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx

from mpjax.models.attention import Implementation
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import INIT, Block, check_length, dropping, post_norm, with_positions


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


EPSILON = 1e-12


class BERT(nnx.Module):
    """Embeddings of tokens, segments and positions, post-norm blocks, the pooler, and a linear classifier.

    Args:
      num_classes: number of logits.
      vocabulary: number of tokens in the vocabulary.
      length: the largest number of tokens in a text.
      width: D.
      depth: number of blocks.
      heads: number of attention heads, a divisor of the width.
      dropout: dropout rate.
      implementation: attention implementation; see `attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        rngs: nnx.Rngs,
        vocabulary: int = 30522,
        length: int = 512,
        width: int,
        depth: int,
        heads: int,
        dropout: float = 0.1,
        implementation: Implementation = "auto",
        scan_blocks: bool = False,
    ):
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.segments = nnx.Embed(2, width, embedding_init=INIT, rngs=rngs)
        self.positions = nnx.Param(INIT(rngs.params(), (length, width)))
        self.norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        self.dropout = dropping(dropout, rngs)
        block = functools.partial(
            Block, width, heads, order=post_norm, epsilon=EPSILON, dropout=dropout, implementation=implementation
        )
        self.blocks = in_series(block, depth, rngs=rngs, scan=scan_blocks)
        self.pooler = nnx.Linear(width, width, kernel_init=INIT, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, kernel_init=INIT, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
        segments: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B K"]:
        """Computes logits from texts.

        Args:
          tokens: int32, padded on the right.
          lengths: int32, the number of tokens of each text that are not padding; all if None.
          segments: int32, 0 for the first sentence and 1 for the second; all 0 if None.

        Raises:
          UsageError: a text has more tokens than there are position embeddings.
        """
        check_length(tokens, self.positions.shape[0])
        x = self.tokens(tokens) + self.segments(jnp.zeros_like(tokens) if segments is None else segments)
        x = self.dropout(self.norm(with_positions(x, self.positions[...])))
        x = through(self.blocks, x, lengths)
        x = jnp.tanh(self.pooler(x[:, 0]))
        return self.head(self.dropout(x))


bert_base = functools.partial(BERT, width=768, depth=12, heads=12)
