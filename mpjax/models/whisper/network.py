"""Whisper: an encoder of log-mel features of sounds, a decoder that writes texts, and a classifier of sounds.

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022 (arXiv:2212.04356), section 2.2.

Shapes: B batch, F frames of a sound, M mel bins, T positions of the encoder (F / 2), U tokens of the text, S keys,
D width, N heads, V vocabulary, K classes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.activations import gelu
from mpjax.models.cross_attention import Change, CrossBlock, Source, SourceAttention
from mpjax.models.fixed import Fixed
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import INIT, MLP, Block, check_length, dropping, with_positions, with_positions_at
from mpjax.models.whisper.settings import WhisperSettings
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


EPSILON = 1e-5
"""Epsilon of the layer norms, those of PyTorch."""


class Whisper(nnx.Module):
    """An encoder of sounds, token embeddings, a decoder, and logits by products with the embeddings.

    Args:
      settings: the sizes of the network.
      scan_blocks: whether the blocks of each stack are one loop over stacked arrays; see `mpjax.models.scan`.
    """

    def __init__(self, settings: WhisperSettings, *, scan_blocks: bool = False, rngs: nnx.Rngs):
        self.settings = settings
        self.encoder = WhisperEncoder(settings, scan_blocks=scan_blocks, rngs=rngs)
        self.tokens = nnx.Embed(settings.vocabulary, settings.width, embedding_init=INIT, rngs=rngs)
        self.decoder = WhisperDecoder(settings, scan_blocks=scan_blocks, rngs=rngs)

    def __call__(self, sounds: Float[Array, "B F M"], targets: Int[Array, "B U"]) -> Float[Array, "B U V"]:
        """Computes the logits of each target token, from the sound and the target tokens before it.

        Args:
          sounds: log-mel features, float32; the first layer casts them to the dtype that it computes in.
          targets: int32, the targets, padded on the right. The last token is not read.

        Raises:
          UsageError: a sound has another number of frames, or there are more tokens than `settings.length`.
        """
        return self.logits(self.features(sounds, targets))

    def features(self, sounds: Float[Array, "B F M"], targets: Int[Array, "B U"]) -> Float[Array, "B U D"]:
        """Computes the features from which `logits` predicts each target token; arguments are those of a call."""
        check_length(targets, self.settings.length)
        start = jnp.full_like(targets[:, :1], self.settings.start)
        read = jnp.concatenate([start, targets[:, :-1]], axis=1)
        return self.decoder(self.tokens(read), self.encoded(sounds))

    def encoded(self, sounds: Float[Array, "B F M"]) -> Float[Array, "B T D"]:
        """Computes the features of sounds that the decoder reads."""
        return self.encoder(sounds)

    def logits(self, features: Float[Array, "*S D"]) -> Float[Array, "*S V"]:
        """Computes the logits of target tokens from features."""
        return self.tokens.attend(features)


class WhisperClassifier(nnx.Module):
    """An encoder of sounds, a linear layer, the mean over positions, and logits of classes.

    Args:
      settings: the sizes of the network.
      num_classes: the number of logits.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.
    """

    def __init__(self, settings: WhisperSettings, *, num_classes: int, scan_blocks: bool = False, rngs: nnx.Rngs):
        self.settings = settings
        self.encoder = WhisperEncoder(settings, scan_blocks=scan_blocks, rngs=rngs)
        self.projector = nnx.Linear(settings.width, settings.projected, kernel_init=INIT, rngs=rngs)
        self.head = nnx.Linear(settings.projected, num_classes, kernel_init=INIT, rngs=rngs)

    def __call__(self, sounds: Float[Array, "B F M"]) -> Float[Array, "B K"]:
        """Computes logits of sounds, given as log-mel features, float32; padding is heard as silence."""
        projected = self.projector(self.encoder(sounds))
        wide = projected.astype(widest(projected.dtype, FLOAT32))
        return self.head(jnp.mean(wide, axis=1).astype(projected.dtype))


class WhisperEncoder(nnx.Module):
    """Two convolutions, the second of which halves the frames, sines of positions, blocks, and a final norm."""

    def __init__(self, settings: WhisperSettings, *, scan_blocks: bool, rngs: nnx.Rngs):
        width = settings.width
        conv = functools.partial(nnx.Conv, kernel_size=(3,), padding=((1, 1),), kernel_init=INIT, rngs=rngs)
        self.conv1 = conv(settings.bins, width)
        self.conv2 = conv(width, width, strides=(2,))
        self.positions = Fixed(jnp.asarray(sines(settings.positions, width)))
        block = functools.partial(
            Block,
            width,
            settings.encoder_heads,
            hidden=settings.encoder_hidden,
            activation=gelu,
            epsilon=EPSILON,
            dropout=settings.dropout,
            unbiased=("key",),
        )
        self.blocks = in_series(block, settings.encoder_depth, rngs=rngs, scan=scan_blocks)
        self.norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        self.dropout = dropping(settings.dropout, rngs)

    def __call__(self, sounds: Float[Array, "B F M"]) -> Float[Array, "B T D"]:
        """Maps log-mel features to features; positions attend to all others.

        Raises:
          UsageError: a sound has another number of frames than two for each position.
        """
        positions = self.positions[...].shape[0]
        if sounds.shape[1] != 2 * positions:
            raise UsageError(f"sounds of {sounds.shape[1]} frames: wanted {2 * positions}, two for each position")
        x = gelu(self.conv2(gelu(self.conv1(sounds))))
        return self.norm(through(self.blocks, self.dropout(with_positions(x, self.positions[...]))))


class WhisperDecoder(nnx.Module):
    """Embeddings of positions, blocks in which tokens attend to those before them and to a sound, and a final norm."""

    def __init__(self, settings: WhisperSettings, *, scan_blocks: bool, rngs: nnx.Rngs):
        self.positions = nnx.Param(INIT(rngs.params(), (settings.length, settings.width)))
        block = functools.partial(WhisperCrossBlock, settings)
        self.blocks = in_series(block, settings.decoder_depth, rngs=rngs, scan=scan_blocks)
        self.norm = nnx.LayerNorm(settings.width, epsilon=EPSILON, rngs=rngs)
        self.dropout = dropping(settings.dropout, rngs)

    def __call__(self, x: Float[Array, "B U D"], source: Float[Array, "B T D"]) -> Float[Array, "B U D"]:
        """Maps embeddings of tokens to features; `source` are the features of sounds."""
        earlier = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
        source = source.astype(widest(source.dtype, FLOAT32))  # its gradient is a sum over all blocks
        x = self.dropout(with_positions(x, self.positions[...]))
        return self.norm(through(self.blocks, x, None, earlier, source, None))

    def continued(
        self,
        x: Float[Array, "B D"],
        positions: Int[Array, " B"],
        keys: int,
        lengths: None,
        source: Sequence[Source],
        changes: Sequence[tuple[Change, Change]],
    ) -> Float[Array, "B D"]:
        """Computes the features of one more token of each text.

        Args:
          x: the embeddings of the tokens.
          positions: int32, their positions.
          keys: the number of keys that a cache has room for.
          lengths: None: all positions of a sound are there.
          source: for each block, the features of the sound, or their keys and values.
          changes: for each block, what becomes of the keys and values of the token, and of those of the sound.
        """
        del lengths
        visible = (jnp.arange(keys, dtype=jnp.int32)[None] <= positions[:, None])[:, None, None]
        y = self.dropout(with_positions_at(positions[:, None], x[:, None], self.positions[...]))
        for block, read, change in zip(self.blocks, source, changes, strict=True):
            y = block(y, None, visible, read, None, *change)
        return self.norm(y)[:, 0]


class WhisperCrossBlock(CrossBlock):
    """A block of the decoder, with layer norms and a GELU."""

    def __init__(self, settings: WhisperSettings, *, rngs: nnx.Rngs):
        width, hidden = settings.width, settings.decoder_hidden
        super().__init__(
            norm=lambda: nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs),
            attention=lambda: WhisperAttention(width, settings.decoder_heads, rngs=rngs),
            mlp=lambda: MLP(width, hidden, gelu, kernel_init=INIT, out_init=INIT, rngs=rngs),
            dropout=settings.dropout,
            rngs=rngs,
        )


class WhisperAttention(SourceAttention):
    """Attention with biases of queries, values and outputs, and none of keys."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        sizes = (heads, width // heads)
        project = functools.partial(nnx.LinearGeneral, width, sizes, kernel_init=INIT, rngs=rngs)
        super().__init__(
            query=project(),
            key=project(use_bias=False),
            value=project(),
            out=nnx.LinearGeneral(sizes, width, axis=(-2, -1), kernel_init=INIT, rngs=rngs),
        )


def sines(length: int, width: int) -> np.ndarray:
    """The embeddings of positions of the encoder, float32 [length, width]: sines, then cosines.

    Angles are positions divided by 10,000^(i / (width / 2 - 1)) for i from 0, as transformers computes them.
    """
    half = width // 2
    step = math.log(10_000) / max(half - 1, 1)
    angles = np.arange(length)[:, None] * np.exp(-step * np.arange(half))[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
