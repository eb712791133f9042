"""ModernBERT: an encoder with rotary positions, gated MLPs, and attention to all tokens in some layers alone.

Warner et al., "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder for Fast, Memory Efficient, and Long
Context Finetuning and Inference", 2024 (arXiv:2412.13663), section 2.1.

Shapes: B batch, T tokens, D width, N heads, H features per head, K classes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.attention import Implementation, attend
from mpjax.models.encoder.modernbert_settings import ModernBERTSettings
from mpjax.models.encoder.network import ACTIVATIONS
from mpjax.models.encoder.sentence import pooled, vectors_of
from mpjax.models.gated_mlp import GatedMLP
from mpjax.models.layer_kinds import attention_options
from mpjax.models.rotary import Rotation, rotate
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import INIT, check_length, dropping


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


class ModernBERT(nnx.Module):
    """Token embeddings with a norm, pre-norm blocks, and one vector for each text.

    Args:
      settings: the sizes and the kind of the network.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.
    """

    def __init__(
        self,
        settings: ModernBERTSettings,
        *,
        implementation: Implementation = "auto",
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        self.settings = settings
        self.tokens = nnx.Embed(settings.vocabulary, settings.width, embedding_init=INIT, rngs=rngs)
        self.norm = _norm(settings, rngs)
        self.dropout = dropping(settings.embedding_dropout, rngs)
        block = functools.partial(ModernBERTBlock, settings, implementation=implementation)
        self.blocks = in_series(block, len(settings.layers), rngs=rngs, scan=scan_blocks)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B D"]:
        """Computes the vectors of texts, float32 or wider; arguments and errors are those of `features`."""
        return vectors_of(self.features(tokens, lengths), lengths, self.settings.sentence)

    def features(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        """Computes the features of each token after the final norm, which is that of the last block.

        Args:
          tokens: int32, padded on the right.
          lengths: int32, the number of tokens of each text that are not padding; all if None.

        Raises:
          UsageError: a text has more tokens than `settings.length`.
        """
        settings = self.settings
        check_length(tokens, settings.length)
        x = self.dropout(self.norm(self.tokens(tokens)))
        kinds = list(dict.fromkeys(settings.layers))
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        features = settings.width // settings.heads
        options = attention_options(kinds, positions, features=features, length=settings.length, dtype=x.dtype)
        chosen = [kinds.index(kind) for kind in settings.layers]
        # The embeddings are normalized already: the first attention has no norm of its own.
        _, normalized = through(self.blocks, (x, x), lengths, options=options, chosen=chosen)
        return normalized


class ModernBERTClassifier(ModernBERT):
    """A `ModernBERT` with a classifier of one vector of each text: a hidden layer and a linear layer.

    Args:
      settings: the settings of the encoder.
      num_classes: the number of logits.
    """

    def __init__(
        self,
        settings: ModernBERTSettings,
        *,
        num_classes: int,
        implementation: Implementation = "auto",
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        super().__init__(settings, implementation=implementation, scan_blocks=scan_blocks, rngs=rngs)
        self.pooler = Pooler(settings, rngs=rngs)
        self.head_dropout = dropping(settings.classifier_dropout, rngs)
        init = nnx.initializers.truncated_normal(settings.width**-0.5)
        self.head = nnx.Linear(settings.width, num_classes, kernel_init=init, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B K"]:
        """Computes logits of texts; arguments and errors are those of `features`."""
        vectors = pooled(self.features(tokens, lengths), lengths, self.settings.classifier_pooling)
        return self.head(self.head_dropout(self.pooler(vectors)))


class Pooler(nnx.Module):
    """The hidden layer of a classifier: a linear layer, an activation and a norm."""

    def __init__(self, settings: ModernBERTSettings, *, rngs: nnx.Rngs):
        width, bias = settings.width, settings.classifier_bias
        self.dense = nnx.Linear(width, width, use_bias=bias, kernel_init=_init_of_branch(settings), rngs=rngs)
        self.activation = ACTIVATIONS[settings.classifier_activation]
        self.norm = _norm(settings, rngs)

    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        return self.norm(self.activation(self.dense(x)))


class ModernBERTBlock(nnx.Module):
    """Attention and an MLP, each with a residual connection, and two norms: before the MLP, and after the block.

    The norm after a block is the one before the next attention, and that of the last block the final norm. So all
    blocks are alike, though no norm is before the first attention, and can be one loop.
    """

    def __init__(self, settings: ModernBERTSettings, *, implementation: Implementation, rngs: nnx.Rngs):
        self.attention = RotaryAttention(settings, implementation=implementation, rngs=rngs)
        self.dropout = dropping(settings.attention_dropout, rngs)
        self.mlp_norm = _norm(settings, rngs)
        self.mlp = GatedMLP(
            settings.width,
            settings.hidden,
            activation=settings.activation,
            use_bias=settings.mlp_bias,
            kernel_init=INIT,
            out_init=_init_of_branch(settings),
            dropout=dropping(settings.mlp_dropout, rngs),
            rngs=rngs,
        )
        self.next_norm = _norm(settings, rngs)

    def __call__(
        self,
        pair: tuple[Float[Array, "B T D"], Float[Array, "B T D"]],
        lengths: Int[Array, " B"] | None,
        rotary: Rotation,
        window: int | jax.Array,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Maps features, and the same normalized, to features and normalized ones.

        Args:
          pair: the features, and what attention reads.
          lengths: the number of positions of each text to attend to; all if None.
          rotary: the rotary cosines and sines of each position, for queries and keys.
          window: a position attends to those less than this many away, on both sides.
        """
        x, normalized = pair
        x = x + self.dropout(self.attention(normalized, lengths, rotary, window))
        x = x + self.mlp(self.mlp_norm(x))
        return x, self.next_norm(x)


class RotaryAttention(nnx.Module):
    """Attention to tokens on both sides, with rotary position embeddings."""

    def __init__(self, settings: ModernBERTSettings, *, implementation: Implementation, rngs: nnx.Rngs):
        width, heads, bias = settings.width, settings.heads, settings.attention_bias
        sizes = heads, width // heads
        project = functools.partial(nnx.LinearGeneral, width, sizes, kernel_init=INIT, use_bias=bias, rngs=rngs)
        self.query = project()
        self.key = project()
        self.value = project()
        init = _init_of_branch(settings)
        self.out = nnx.LinearGeneral(sizes, width, axis=(-2, -1), kernel_init=init, use_bias=bias, rngs=rngs)
        self.implementation: Implementation = implementation

    def __call__(
        self,
        x: Float[Array, "B T D"],
        lengths: Int[Array, " B"] | None,
        rotary: Rotation,
        window: int | jax.Array,
    ) -> Float[Array, "B T D"]:
        query, key = rotate(self.query(x), rotary), rotate(self.key(x), rotary)
        options = {"lengths": lengths, "window": window, "implementation": self.implementation}
        return self.out(attend(query, key, self.value(x), **options))


def _norm(settings: ModernBERTSettings, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(settings.width, epsilon=settings.epsilon, use_bias=settings.norm_bias, rngs=rngs)


def _init_of_branch(settings: ModernBERTSettings) -> nnx.Initializer:
    """Makes the initializer of kernels whose outputs are added to the residual, which falls with the number of layers.

    That of the classifier's hidden layer is the same.
    """
    return nnx.initializers.truncated_normal(0.02 / (2 * len(settings.layers)) ** 0.5)
