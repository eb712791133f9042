"""T5: an encoder that reads a text, and a decoder that writes another one.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019
(arXiv:1910.10683); with gated MLPs (v1.1), Shazeer, 2020 (arXiv:2002.05202).

Shapes: B batch, T tokens of the source, U tokens of the target, D width, N heads, H features per head, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models.activations import relu
from mpjax.models.cross_attention import Change, CrossBlock, Source, SourceAttention
from mpjax.models.decoder.network import RMSNorm
from mpjax.models.gated_mlp import GatedMLP
from mpjax.models.scan import in_series, through
from mpjax.models.t5.positions import RelativePositions
from mpjax.models.t5.settings import T5Settings
from mpjax.models.transformer import dropping
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Bool, Float, Int


class T5(nnx.Module):
    """Token embeddings that encoder and decoder share, the two stacks, and logits.

    Args:
      settings: the sizes and the kind of the network.
      scan_blocks: whether the blocks of each stack are one loop over stacked arrays; see `mpjax.models.scan`.
    """

    def __init__(self, settings: T5Settings, *, scan_blocks: bool = False, rngs: nnx.Rngs):
        normal = nnx.initializers.normal
        self.settings = settings
        self.tokens = nnx.Embed(settings.vocabulary, settings.width, embedding_init=normal(1.0), rngs=rngs)
        self.encoder = T5Encoder(settings, scan_blocks=scan_blocks, rngs=rngs)
        self.decoder = T5Decoder(settings, scan_blocks=scan_blocks, rngs=rngs)
        head = functools.partial(nnx.Linear, use_bias=False, kernel_init=normal(settings.width**-0.5), rngs=rngs)
        self.head = None if settings.tied else head(settings.width, settings.vocabulary)

    def __call__(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None, targets: Int[Array, "B U"]
    ) -> Float[Array, "B U V"]:
        """Computes the logits of each target token, from the source and the target tokens before it.

        Args:
          tokens: int32, the sources, padded on the right.
          lengths: int32, the number of tokens of each source that are not padding; all if None.
          targets: int32, the targets, padded on the right. The last token is not read.
        """
        return self.logits(self.features(tokens, lengths, targets))

    def features(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None, targets: Int[Array, "B U"]
    ) -> Float[Array, "B U D"]:
        """Computes the features from which `logits` predicts each target token; arguments are those of a call."""
        start = jnp.full_like(targets[:, :1], self.settings.start)
        read = jnp.concatenate([start, targets[:, :-1]], axis=1)
        return self.decoder(self.tokens(read), self.encoded(tokens, lengths), lengths)

    def encoded(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None) -> Float[Array, "B T D"]:
        """Computes the features of sources that the decoder reads."""
        return self.encoder(self.tokens(tokens), lengths)

    def logits(self, features: Float[Array, "*S D"]) -> Float[Array, "*S V"]:
        """Computes the logits of target tokens from features."""
        if self.settings.scaled:
            wide = features.astype(widest(features.dtype, FLOAT32))
            features = (wide * np.asarray(self.settings.width**-0.5, wide.dtype)).astype(features.dtype)
        return self.tokens.attend(features) if self.head is None else self.head(features)


class T5Encoder(nnx.Module):
    """Blocks in which each token attends to all of its text, and a final norm."""

    def __init__(self, settings: T5Settings, *, scan_blocks: bool, rngs: nnx.Rngs):
        self.positions = _positions(settings, both_sides=True, rngs=rngs)
        self.blocks = in_series(
            functools.partial(T5Block, settings), settings.encoder_depth, rngs=rngs, scan=scan_blocks
        )
        self.norm = _norm(settings, rngs)
        self.dropout = dropping(settings.dropout, rngs)

    def __call__(self, x: Float[Array, "B T D"], lengths: Int[Array, " B"] | None) -> Float[Array, "B T D"]:
        """Maps embeddings to features; no token attends to those from `lengths` on (None: to all)."""
        length = x.shape[1]
        bias = self.positions(jnp.arange(length, dtype=jnp.int32)[None], length)
        x = through(self.blocks, self.dropout(x), bias, mask_of(lengths, length))
        return self.dropout(self.norm(x))


class T5Decoder(nnx.Module):
    """Blocks in which each token attends to those before it and to the source, and a final norm."""

    def __init__(self, settings: T5Settings, *, scan_blocks: bool, rngs: nnx.Rngs):
        self.positions = _positions(settings, both_sides=False, rngs=rngs)
        block = functools.partial(T5CrossBlock, settings)
        self.blocks = in_series(block, settings.decoder_depth, rngs=rngs, scan=scan_blocks)
        self.norm = _norm(settings, rngs)
        self.dropout = dropping(settings.dropout, rngs)

    def __call__(
        self, x: Float[Array, "B U D"], source: Float[Array, "B T D"], lengths: Int[Array, " B"] | None
    ) -> Float[Array, "B U D"]:
        """Maps embeddings to features; `source` are those of the encoder, of texts with these `lengths`."""
        length = x.shape[1]
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        earlier = jnp.tril(jnp.ones((1, 1, length, length), bool))
        source = source.astype(widest(source.dtype, FLOAT32))  # its gradient is a sum over all blocks
        x = self.dropout(x)
        x = through(
            self.blocks, x, self.positions(positions, length), earlier, source, mask_of(lengths, source.shape[1])
        )
        return self.dropout(self.norm(x))

    def continued(
        self,
        x: Float[Array, "B D"],
        positions: Int[Array, " B"],
        keys: int,
        lengths: Int[Array, " B"],
        source: Sequence[Source],
        changes: Sequence[tuple[Change, Change]],
    ) -> Float[Array, "B D"]:
        """Computes the features of one more token of each text.

        Args:
          x: the embeddings of the tokens.
          positions: int32, their positions.
          keys: the number of keys that a cache has room for.
          lengths: int32, the number of tokens of each source.
          source: for each block, the features of the source, or their keys and values.
          changes: for each block, what becomes of the keys and values of the token, and of those of the source.
        """
        bias = self.positions(positions[:, None], keys)
        visible = (jnp.arange(keys, dtype=jnp.int32)[None] <= positions[:, None])[:, None, None]
        y = self.dropout(x)[:, None]
        for block, read, change in zip(self.blocks, source, changes, strict=True):
            size = (read[0] if isinstance(read, tuple) else read).shape[1]
            y = block(y, bias, visible, read, mask_of(lengths, size), *change)
        return self.dropout(self.norm(y))[:, 0]


class T5Block(nnx.Module):
    """Attention and an MLP, each with a norm before it and a residual connection around norm and layer."""

    def __init__(self, settings: T5Settings, *, rngs: nnx.Rngs):
        self.norm1 = _norm(settings, rngs)
        self.attention = T5Attention(settings, rngs=rngs)
        self.norm2 = _norm(settings, rngs)
        self.mlp = _mlp(settings, rngs)
        self.dropout = dropping(settings.dropout, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], bias: Float[Array, "1 N T T"], mask: Bool[Array, "B 1 1 T"] | None
    ) -> Float[Array, "B T D"]:
        """Maps features to features.

        Args:
          x: the features.
          bias: what is added to the scores, in float32 or wider.
          mask: False where no position may attend to.
        """
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, bias, mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class T5CrossBlock(CrossBlock):
    """A block like `T5Block`, with attention to a source between its attention and its MLP."""

    def __init__(self, settings: T5Settings, *, rngs: nnx.Rngs):
        super().__init__(
            norm=lambda: _norm(settings, rngs),
            attention=lambda: T5Attention(settings, rngs=rngs),
            mlp=lambda: _mlp(settings, rngs),
            dropout=settings.dropout,
            rngs=rngs,
        )


class T5Attention(SourceAttention):
    """Attention without a scale of the scores, and without biases of its layers."""

    def __init__(self, settings: T5Settings, *, rngs: nnx.Rngs):
        width, sizes = settings.width, (settings.heads, settings.head_features)
        normal, whole = nnx.initializers.normal, settings.heads * settings.head_features
        project = functools.partial(nnx.LinearGeneral, width, sizes, use_bias=False, rngs=rngs)
        super().__init__(
            # The initial scores have no scale either: the kernel of the queries has it.
            query=project(kernel_init=normal((width * settings.head_features) ** -0.5)),
            key=project(kernel_init=normal(width**-0.5)),
            value=project(kernel_init=normal(width**-0.5)),
            out=nnx.LinearGeneral(
                sizes, width, axis=(-2, -1), use_bias=False, kernel_init=normal(whole**-0.5), rngs=rngs
            ),
            scale=1.0,
        )


class T5MLP(nnx.Module):
    """Two linear layers without biases, with a ReLU between them."""

    def __init__(self, settings: T5Settings, *, rngs: nnx.Rngs):
        width, hidden, normal = settings.width, settings.hidden, nnx.initializers.normal
        self.up = nnx.Linear(width, hidden, use_bias=False, kernel_init=normal(width**-0.5), rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, kernel_init=normal(hidden**-0.5), rngs=rngs)
        self.dropout = dropping(settings.dropout, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(self.dropout(relu(self.up(x))))


def mask_of(lengths: Int[Array, " B"] | None, length: int) -> Bool[Array, "B 1 1 S"] | None:
    """True for the first positions of each text, at least one; None where all are there."""
    if lengths is None:
        return None
    return (jnp.arange(length, dtype=jnp.int32)[None] < jnp.maximum(lengths, 1)[:, None])[:, None, None]


def _mlp(settings: T5Settings, rngs: nnx.Rngs) -> T5MLP | GatedMLP:
    if not settings.gated:
        return T5MLP(settings, rngs=rngs)
    return GatedMLP(
        settings.width,
        settings.hidden,
        activation=settings.activation,
        use_bias=False,
        kernel_init=nnx.initializers.normal(settings.width**-0.5),
        out_init=nnx.initializers.normal(settings.hidden**-0.5),
        dropout=dropping(settings.dropout, rngs),
        rngs=rngs,
    )


def _norm(settings: T5Settings, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(settings.width, epsilon=settings.epsilon, offset=0.0, rngs=rngs)


def _positions(settings: T5Settings, *, both_sides: bool, rngs: nnx.Rngs) -> RelativePositions:
    std = settings.width**-0.5
    return RelativePositions(
        settings.buckets, settings.farthest, settings.heads, both_sides=both_sides, std=std, rngs=rngs
    )
