"""The encoder of BERT, RoBERTa and sentence encoders of their shape: one network, whose settings tell them apart.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018 (arXiv:1810.04805); Liu et al., "RoBERTa: A
Robustly Optimized BERT Pretraining Approach", 2019 (arXiv:1907.11692); Reimers and Gurevych, "Sentence-BERT", 2019
(arXiv:1908.10084).

Shapes: B batch, T tokens, D width, K classes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx

from mpjax.models.activations import gelu, relu, tanh_gelu
from mpjax.models.attention import Implementation
from mpjax.models.encoder.sentence import vectors_of
from mpjax.models.encoder.settings import EncoderSettings
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import (
    INIT,
    Block,
    check_length,
    dropping,
    post_norm,
    with_positions,
    with_positions_at,
)


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


ACTIVATIONS = {"gelu": gelu, "tanh_gelu": tanh_gelu, "relu": relu}


class Encoder(nnx.Module):
    """Embeddings of tokens, segments and positions, post-norm blocks, and one vector for each text.

    Args:
      settings: the sizes and the kind of the network.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        *,
        implementation: Implementation = "auto",
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        width = settings.width
        self.settings = settings
        self.tokens = nnx.Embed(settings.vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.segments = nnx.Embed(settings.segments, width, embedding_init=INIT, rngs=rngs)
        self.positions = nnx.Param(INIT(rngs.params(), (settings.positions, width)))
        self.norm = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)
        self.dropout = dropping(settings.dropout, rngs)
        block = functools.partial(
            Block,
            width,
            settings.heads,
            hidden=settings.hidden,
            order=post_norm,
            activation=ACTIVATIONS[settings.activation],
            epsilon=settings.epsilon,
            dropout=settings.dropout,
            implementation=implementation,
        )
        self.blocks = in_series(block, settings.depth, rngs=rngs, scan=scan_blocks)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B D"]:
        """Computes the vectors of texts, float32 or wider; arguments and errors are those of `features`."""
        return vectors_of(self.features(tokens, lengths), lengths, self.settings.sentence)

    def features(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        """Computes the features of each token after the last block.

        Args:
          tokens: int32, padded on the right.
          lengths: int32, the number of tokens of each text that are not padding; all if None.

        Raises:
          UsageError: a text has more tokens than `settings.length`.
        """
        check_length(tokens, self.settings.length)
        x = self.tokens(tokens) + self.segments(jnp.zeros_like(tokens))
        padding, table = self.settings.padding, self.positions[...]
        if padding is None:
            x = with_positions(x, table)
        else:
            is_text = (tokens != padding).astype(jnp.int32)
            x = with_positions_at(jnp.cumsum(is_text, axis=1, dtype=jnp.int32) * is_text + padding, x, table)
        return through(self.blocks, self.dropout(self.norm(x)), lengths)


class EncoderClassifier(Encoder):
    """An `Encoder` with a classifier of its first token: a linear layer, tanh, and a linear layer.

    Args:
      settings: the settings of the encoder.
      num_classes: the number of logits.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        *,
        num_classes: int,
        implementation: Implementation = "auto",
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        super().__init__(settings, implementation=implementation, scan_blocks=scan_blocks, rngs=rngs)
        self.pooler = nnx.Linear(settings.width, settings.width, kernel_init=INIT, rngs=rngs)
        self.head = nnx.Linear(settings.width, num_classes, kernel_init=INIT, rngs=rngs)
        self.head_dropout = dropping(settings.head_dropout, rngs)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B K"]:
        """Computes logits of texts; arguments and errors are those of `features`."""
        first = self.features(tokens, lengths)[:, 0]
        if self.settings.family == "roberta":
            first = self.head_dropout(first)
        return self.head(self.head_dropout(jnp.tanh(self.pooler(first))))
