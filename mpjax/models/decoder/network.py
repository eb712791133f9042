"""The decoder of Llama 3, Mistral, Qwen 2 and 3, Gemma 2 and 3 and SmolLM: one network, whose settings tell them apart.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023 (arXiv:2302.13971), section 2.2, with
grouped queries (Ainslie et al., 2023, arXiv:2305.13245).

Shapes: B batch, T tokens, D width, N query heads, K key and value heads, H features per head, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models.attention import Attend, Implementation, attend
from mpjax.models.decoder.settings import DecoderSettings
from mpjax.models.gated_mlp import GatedMLP, same
from mpjax.models.layer_kinds import LayerKind, attention_options
from mpjax.models.rotary import Rotation, rotate
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import WholeTexts, check_length
from mpjax.precision.attention import soft_cap
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int

    from mpjax.models.documents import Apart


class Decoder(nnx.Module):
    """Token embeddings, causal pre-norm blocks, a final norm, and logits.

    Args:
      settings: the sizes and the kind of the network.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.

    Attributes:
      documents: None, or what keeps the documents of a row apart: no token attends to another document. Rotations are
        of positions in the row: attention reads their differences alone.
      context: the positions that it is called with: all, or a device's part of each text.
    """

    documents: Apart | None = None
    context: WholeTexts = WholeTexts()

    def __init__(
        self,
        settings: DecoderSettings,
        *,
        implementation: Implementation = "auto",
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        normal = nnx.initializers.normal(0.02)
        self.settings = settings
        self.tokens = nnx.Embed(settings.vocabulary, settings.width, embedding_init=normal, rngs=rngs)
        block = functools.partial(DecoderBlock, settings, _mlps(settings), implementation=implementation)
        self.blocks = in_series(block, len(settings.layers), rngs=rngs, scan=scan_blocks)
        self.norm = _norm(settings, settings.width, rngs)
        head = functools.partial(nnx.Linear, use_bias=False, kernel_init=normal, rngs=rngs)
        self.head = None if settings.tied else head(settings.width, settings.vocabulary)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T V"]:
        """Computes the logits of each next token.

        Args:
          tokens: int32, padded on the right.
          lengths: int32, the number of tokens of each text that are not padding; all if None.

        Raises:
          UsageError: a text has more tokens than `settings.length`.
        """
        return self.logits(self.features(tokens, lengths))

    @property
    def length(self) -> int:
        """The largest number of tokens in a text."""
        return self.settings.length

    @property
    def balance(self) -> float:
        """The factor of the load-balancing loss of experts (`mpjax.training.expert_balance`); 0 without experts."""
        return self.settings.experts.balance if self.settings.experts else 0.0

    def features(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        """Computes the features of each position after the final norm, from which `logits` predicts the next token.

        Arguments and errors are those of a call of the model.
        """
        return self.norm(self._through_blocks(tokens, lengths, same))

    def features_and_load(
        self, tokens: Int[Array, "B T"], load: Any, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Computes `features`, and how much each expert was used, of a decoder with experts.

        `load` is that before the first layer: a `Load` or `Routings` of `mpjax.models.decoder.experts`.
        """
        x, load = self._through_blocks(tokens, lengths, lambda x: (x, load))
        return self.norm(x), load

    def _through_blocks(self, tokens: jax.Array, lengths: jax.Array | None, carried: Callable) -> Any:
        whole = self.context.whole(tokens)
        check_length(whole, self.length)
        layers = self.settings.layers
        kinds = list(dict.fromkeys(layers))
        x = self._embedded(tokens)
        options = self._attention_options(kinds, self.context.places(tokens.shape[1])[None], x.dtype)
        attends = self.context.attend(None if self.documents is None else self.documents.attend(whole))
        chosen = [kinds.index(kind) for kind in layers]
        return through(self.blocks, carried(x), lengths, attends, options=options, chosen=chosen)

    def continued(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend_by: Sequence[Attend]
    ) -> Float[Array, "B T D"]:
        """Computes the features of tokens at any positions; see `mpjax.models.generation.programs.LanguageModel`."""
        x = self._embedded(tokens)
        options = self._attention_options(self.settings.layers, positions, x.dtype)
        for block, option, attends in zip(self.blocks, options, attend_by, strict=True):
            x = block(x, None, attends, *option)
        return self.norm(x)

    def _embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x, scale = self.tokens(tokens), self.settings.embedding_scale
        if scale == 1:
            return x
        wide = x.astype(widest(x.dtype, FLOAT32))
        return (wide * np.asarray(scale, wide.dtype)).astype(x.dtype)

    def _attention_options(
        self, kinds: Sequence[LayerKind], positions: Int[Array, "B T"], dtype: np.dtype
    ) -> list[tuple[Rotation, int]]:
        settings = self.settings
        return attention_options(kinds, positions, features=settings.head_features, length=self.length, dtype=dtype)

    def logits(self, features: Float[Array, "*S D"]) -> Float[Array, "*S V"]:
        """Computes the logits of each next token from features, limited by `settings.logit_cap` if that is set."""
        logits = self.tokens.attend(features) if self.head is None else self.head(features)
        return logits if self.settings.logit_cap is None else soft_cap(logits, self.settings.logit_cap)


class DecoderBlock(nnx.Module):
    """Attention and an MLP, each with a norm before it and a residual connection around norm and layer.

    With `settings.norms_after`, the output of each is normalized before it is added to the residual.
    """

    def __init__(
        self,
        settings: DecoderSettings,
        mlps: Iterator[Callable[[nnx.Rngs], nnx.Module]],
        *,
        implementation: Implementation,
        rngs: nnx.Rngs,
    ):
        norm = functools.partial(_norm, settings, settings.width, rngs)
        self.norm1 = norm()
        self.attention = GroupedAttention(settings, implementation=implementation, rngs=rngs)
        self.norm2 = norm()
        self.mlp: Any = next(mlps)(rngs)
        self.norm_after_attention = norm() if settings.norms_after else same
        self.norm_after_mlp = norm() if settings.norms_after else same

    def __call__(
        self,
        x: Any,
        lengths: Int[Array, " B"] | None,
        attends: Attend | None,
        rotary: Rotation,
        window: int | jax.Array,
    ) -> Any:
        """Maps features to features.

        Args:
          x: the features; with experts, also a tuple of features and a load, and so is the result
            (`mpjax.models.decoder.experts.Load`).
          lengths: the number of positions of each text to attend to; all if None.
          attends: takes the place of `mpjax.models.attention.attend`; None: that one.
          rotary: the rotary cosines and sines of each position, for queries and keys.
          window: the number of positions that a position attends to, itself and those right before it.
        """
        x, load = x if isinstance(x, tuple) else (x, None)
        x = x + self.norm_after_attention(self.attention(self.norm1(x), lengths, attends, rotary, window))
        if load is None:
            return x + self.norm_after_mlp(self.mlp(self.norm2(x)))
        if isinstance(self.mlp, GatedMLP):  # a layer without experts among others with some
            return x + self.norm_after_mlp(self.mlp(self.norm2(x))), load
        change, load = self.mlp(self.norm2(x), load)
        return x + self.norm_after_mlp(change), load


def _mlps(settings: DecoderSettings) -> Iterator[Callable[[nnx.Rngs], nnx.Module]]:
    """Yields for each layer the function that makes its MLP, or its mixture of experts."""

    def dense(rngs: nnx.Rngs) -> nnx.Module:
        return GatedMLP(
            settings.width,
            settings.hidden,
            activation=settings.activation,
            use_bias=settings.mlp_bias,
            kernel_init=nnx.initializers.normal(0.02),
            out_init=nnx.initializers.normal(_of_branch(settings)),
            rngs=rngs,
        )

    experts = settings.experts
    if experts is None:
        yield from [dense] * len(settings.layers)
        return
    from mpjax.models.decoder.experts import MixtureOfExperts  # local, because few decoders have experts

    def sparse(rngs: nnx.Rngs) -> nnx.Module:
        out_init = nnx.initializers.normal(_of_branch(settings))
        return MixtureOfExperts(settings.width, experts, activation=settings.activation, out_init=out_init, rngs=rngs)

    yield from (sparse if has_experts else dense for has_experts in experts.sparse)


class GroupedAttention(nnx.Module):
    """Causal attention with rotary position embeddings, in which groups of query heads share a key and a value head."""

    def __init__(self, settings: DecoderSettings, *, implementation: Implementation, rngs: nnx.Rngs):
        width, heads, features = settings.width, settings.heads, settings.head_features
        normal = nnx.initializers.normal
        project = functools.partial(
            nnx.LinearGeneral, width, kernel_init=normal(0.02), use_bias=settings.qkv_bias, rngs=rngs
        )
        self.query = project((heads, features))
        self.key = project((settings.key_heads, features))
        self.value = project((settings.key_heads, features))
        self.out = nnx.LinearGeneral(
            (heads, features),
            width,
            axis=(-2, -1),
            kernel_init=normal(_of_branch(settings)),
            use_bias=settings.out_bias,
            rngs=rngs,
        )
        joint = settings.norms_of_projections
        sizes = [features * count if joint else features for count in (heads, settings.key_heads)]
        self.query_norm, self.key_norm = (
            _norm(settings, size, rngs) if joint or settings.norms_of_heads else same for size in sizes
        )
        self.joint_norms = joint
        self.scale = settings.score_scale
        self.cap = settings.score_cap
        self.implementation: Implementation = implementation

    def __call__(
        self,
        x: Float[Array, "B T D"],
        lengths: Int[Array, " B"] | None,
        attends: Attend | None,
        rotary: Rotation,
        window: int | jax.Array,
    ) -> Float[Array, "B T D"]:
        query, key = self.query(x), self.key(x)
        if self.joint_norms:
            query, key = (
                norm(heads.reshape(*heads.shape[:-2], -1)).reshape(heads.shape)
                for norm, heads in ((self.query_norm, query), (self.key_norm, key))
            )
        else:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, rotary), rotate(key, rotary)
        mixed = (attends or attend)(
            query,
            key,
            self.value(x),
            lengths=lengths,
            is_causal=True,
            window=window,
            scale=self.scale,
            cap=self.cap,
            implementation=self.implementation,
        )
        return self.out(mixed)


class RMSNorm(nnx.Module):
    """Divides features by the root of their mean square, and multiplies them by a learned scale for each feature.

    It computes in float32 or wider, and the result has the dtype of the input (Zhang & Sennrich, 2019,
    arXiv:1910.07467).

    Args:
      features: the number of features.
      epsilon: the number that is added to the mean square.
      offset: the number that is added to the stored scale, whose initial value is 1 - `offset`.
    """

    def __init__(self, features: int, *, epsilon: float, offset: float, rngs: nnx.Rngs):
        del rngs  # the initial scale is not random
        self.scale = nnx.Param(jnp.full(features, 1 - offset, FLOAT32))
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        dtype = widest(x.dtype, FLOAT32)
        wide = x.astype(dtype)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].astype(dtype) + np.asarray(self.offset, dtype)
        scaled = wide * jax.lax.rsqrt(square + np.asarray(self.epsilon, dtype)) * jnp.broadcast_to(scale, x.shape)
        return scaled.astype(x.dtype)


def _norm(settings: DecoderSettings, features: int, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(features, epsilon=settings.epsilon, offset=settings.norm_offset, rngs=rngs)


def _of_branch(settings: DecoderSettings) -> float:
    """The standard deviation of the initial kernels whose outputs are added to the residual.

    It falls with the number of layers, so that the sum of all outputs does not grow with it.
    """
    return 0.02 / (2 * len(settings.layers)) ** 0.5
