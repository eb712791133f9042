"""GPT-2: a decoder that predicts each next token from the tokens before it.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. The token embedding is tied to the output
projection (Press & Wolf, 2016, arXiv:1608.05859).

Shapes: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flax import nnx

from mpjax.models.activations import tanh_gelu
from mpjax.models.attention import Attend, Implementation
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import (
    Block,
    NormKernel,
    WholeTexts,
    check_length,
    dropping,
    pre_norm_by,
    with_positions,
    with_positions_at,
)


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int

    from mpjax.models.documents import Apart


EPSILON = 1e-5


class GPT2(nnx.Module):
    """Token and position embeddings, causal pre-norm blocks, a final norm, and logits from the tied token embedding.

    Args:
      vocabulary: V, number of tokens in the vocabulary.
      length: the largest number of tokens in a text.
      width: D.
      depth: number of blocks.
      heads: number of attention heads, a divisor of the width.
      dropout: dropout rate.
      implementation: attention implementation; see `attend`.
      norm_kernel: what computes the backward pass of the blocks' norms on NVIDIA GPUs; see `pre_norm_by`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.

    Attributes:
      documents: None, or what keeps the documents of a row apart: no token attends to another document, and the
        positions of each document begin with 0.
      context: the positions that it is called with: all, or a device's part of each text.
    """

    documents: Apart | None = None
    context: WholeTexts = WholeTexts()

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        vocabulary: int = 50257,
        length: int = 1024,
        width: int,
        depth: int,
        heads: int,
        dropout: float = 0.1,
        implementation: Implementation = "auto",
        norm_kernel: NormKernel = "xla",
        scan_blocks: bool = False,
    ):
        normal = nnx.initializers.normal
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=normal(0.02), rngs=rngs)
        self.positions = nnx.Param(normal(0.01)(rngs.params(), (length, width)))
        self.dropout = dropping(dropout, rngs)
        block = functools.partial(
            Block,
            width,
            heads,
            order=pre_norm_by(norm_kernel),
            activation=tanh_gelu,
            epsilon=EPSILON,
            is_causal=True,
            dropout=dropout,
            implementation=implementation,
            kernel_init=normal(0.02),
            out_init=normal(0.02 / (2 * depth) ** 0.5),  # keeps the variance: 2 * depth branches are summed
        )
        self.blocks = in_series(block, depth, rngs=rngs, scan=scan_blocks)
        self.norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Computes the logits of each next token from int32 tokens.

        Raises:
          UsageError: a text has more tokens than there are position embeddings.
        """
        return self.logits(self.features(tokens))

    @property
    def length(self) -> int:
        """The largest number of tokens in a text."""
        return self.positions.shape[0]

    def features(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Computes the features of each position after the final norm, from which `logits` predicts the next token.

        Raises:
          UsageError: a text has more tokens than there are position embeddings.
        """
        context, whole = self.context, self.context.whole(tokens)
        check_length(whole, self.length)
        x, table = self.tokens(tokens), self.positions[...]
        if self.documents is None:
            x, attends = with_positions(x, context.rows(table, tokens.shape[1])), None
        else:
            x = with_positions_at(context.own(self.documents.positions(whole)), x, table)
            attends = self.documents.attend(whole)
        return self.norm(through(self.blocks, self.dropout(x), None, context.attend(attends)))

    def continued(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend_by: Sequence[Attend]
    ) -> Float[Array, "B T D"]:
        """Computes the features of tokens at any positions; see `mpjax.models.generation.programs.LanguageModel`."""
        x = self.tokens(tokens)
        x = self.dropout(x + self.positions[...][positions].astype(x.dtype))
        for block, attends in zip(self.blocks, attend_by, strict=True):
            x = block(x, None, attends)
        return self.norm(x)

    def logits(self, features: Float[Array, "*S D"]) -> Float[Array, "*S V"]:
        """Computes the logits of each next token from features, as products with the token embeddings."""
        return self.tokens.attend(features)


gpt2_small = functools.partial(GPT2, width=768, depth=12, heads=12)
