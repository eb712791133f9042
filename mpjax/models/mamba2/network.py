"""Mamba-2, a language model without attention: a convolution over a few positions and a recurrence over all of them.

Dao & Gu, 2024 (arXiv:2405.21060), section 7, with the layers and names of Hugging Face transformers.

Shapes: B batch, T tokens, D width, H heads, P features of a head, I = H P, G groups, N states, F = I + 2 G N features
of the convolution, W its positions, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.decoder.network import RMSNorm
from mpjax.models.mamba2.scan import state_space
from mpjax.models.mamba2.settings import Mamba2Settings
from mpjax.models.scan import in_series, through
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int

    from mpjax.models.documents import Apart


LONGEST = 2**20
"""The largest number of tokens in a text. The network itself has no limit."""


class MixerState(NamedTuple):
    """What a layer remembers of the tokens before: all that later ones depend on.

    Attributes:
      taps: [B, W - 1, F], the last inputs of the convolution.
      state: float32 (or wider) [B, H, P, N], the state of the recurrence.
    """

    taps: jax.Array
    state: jax.Array


class ReadsState:
    """Remembers the first tokens of texts for a layer, in `kept`: those that are not padding.

    Args:
      lengths: int32 [B], the number of tokens of each text that are not padding; all if None.
    """

    kept: MixerState
    before: MixerState | None = None

    def __init__(self, lengths: Int[Array, " B"] | None):
        self.lengths = lengths


class ContinuesState:
    """Continues a layer from what it remembers of the tokens before; afterwards, `kept` has one more.

    Args:
      before: what the layer remembers.
      positions: int32 [B], which it does not read: the memory knows no positions.
    """

    kept: MixerState
    lengths = None

    def __init__(self, before: MixerState, positions: Int[Array, " B"]):
        del positions
        self.before = before


class Mamba2(nnx.Module):
    """Token embeddings, blocks of a norm and a mixer, a final norm, and logits.

    Args:
      settings: the sizes of the network.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.

    Attributes:
      documents: None, or what keeps the documents of a row apart: states and convolutions begin anew.
    """

    documents: Apart | None = None
    length = LONGEST
    reads, continues = ReadsState, ContinuesState
    """What generation keeps of each block, in place of keys and values; see `mpjax.models.generation.programs`."""

    def __init__(self, settings: Mamba2Settings, *, scan_blocks: bool = False, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        self.settings = settings
        self.tokens = nnx.Embed(settings.vocabulary, settings.width, embedding_init=normal, rngs=rngs)
        self.blocks = in_series(functools.partial(Mamba2Block, settings), settings.layers, rngs=rngs, scan=scan_blocks)
        self.norm = RMSNorm(settings.width, epsilon=settings.epsilon, offset=0.0, rngs=rngs)
        head = functools.partial(nnx.Linear, use_bias=False, kernel_init=normal, rngs=rngs)
        self.head = None if settings.tied else head(settings.width, settings.vocabulary)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T V"]:
        """Computes the logits of each next token.

        Args:
          tokens: int32, padded on the right, where no other token sees padding.
          lengths: is not needed, and not read.
        """
        return self.logits(self.features(tokens, lengths))

    def features(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        """Computes the features of each position after the final norm; arguments are those of a call of the model."""
        del lengths
        segments = None if self.documents is None else self.documents.segments(tokens)
        return self.norm(through(self.blocks, self._embedded(tokens), segments))

    def continued(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend_by: Sequence[Any]
    ) -> Float[Array, "B T D"]:
        """Computes the features of tokens after those that blocks remember.

        `attend_by` are `ReadsState` or `ContinuesState`, one for each block.
        """
        del positions
        x = self._embedded(tokens)
        for block, memory in zip(self.blocks, attend_by, strict=True):
            x = block(x, None, memory)
        return self.norm(x)

    def _embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = self.tokens(tokens)
        return x.astype(widest(x.dtype, FLOAT32)) if self.settings.wide_residual else x

    def logits(self, features: Float[Array, "*S D"]) -> Float[Array, "*S V"]:
        """Computes the logits of each next token from features."""
        return self.tokens.attend(features) if self.head is None else self.head(features)


class Mamba2Block(nnx.Module):
    """A norm and a mixer, with a residual connection around both, in the dtype of its input."""

    def __init__(self, settings: Mamba2Settings, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(settings.width, epsilon=settings.epsilon, offset=0.0, rngs=rngs)
        self.mixer = Mixer(settings, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], segments: Int[Array, "B T"] | None = None, memory: Any = None
    ) -> Float[Array, "B T D"]:
        return x + self.mixer(self.norm(x), segments, memory).astype(x.dtype)


class Mixer(nnx.Module):
    """Projections around a convolution, a recurrence and a gated norm."""

    def __init__(self, settings: Mamba2Settings, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal
        self.settings = settings
        shared = 2 * settings.groups * settings.state
        linear = functools.partial(nnx.Linear, use_bias=settings.bias, rngs=rngs)
        outputs = 2 * settings.inner + shared + settings.heads
        self.in_proj = linear(settings.width, outputs, kernel_init=normal(0.02))
        self.conv = CausalConv(settings.inner + shared, settings, rngs=rngs)
        self.space = StateSpace(settings, rngs=rngs)
        self.norm = GatedRMSNorm(settings, rngs=rngs)
        out_init = normal(0.02 / settings.layers**0.5)
        self.out_proj = linear(settings.inner, settings.width, kernel_init=out_init)

    def __call__(
        self, x: Float[Array, "B T D"], segments: Int[Array, "B T"] | None = None, memory: Any = None
    ) -> Float[Array, "B T D"]:
        settings, (batch, length) = self.settings, x.shape[:2]
        shared = settings.groups * settings.state
        gate, mixed, steps = jnp.split(self.in_proj(x), (settings.inner, 2 * settings.inner + 2 * shared), axis=-1)
        before = memory.before if memory is not None else None
        taps = before.taps if before is not None else None
        features, taps_after = self.conv(mixed, segments, taps, None if memory is None else memory.lengths)
        values, inputs, outputs = jnp.split(features, (settings.inner, settings.inner + shared), axis=-1)
        values = values.reshape(batch, length, settings.heads, settings.head_features)
        steps, rates, skip = self.space(steps, None if memory is None else memory.lengths)
        y, state = state_space(
            values,
            steps,
            rates,
            inputs.reshape(batch, length, settings.groups, settings.state),
            outputs.reshape(batch, length, settings.groups, settings.state),
            chunk=settings.chunk,
            before=None if before is None else before.state,
            segments=segments,
        )
        y = y + values.astype(y.dtype) * jnp.broadcast_to(skip.astype(y.dtype)[:, None], values.shape)
        if memory is not None:
            memory.kept = MixerState(taps_after, state)
        return self.out_proj(self.norm(y.reshape(batch, length, settings.inner), gate))


class CausalConv(nnx.Module):
    """A convolution of each feature over the last W positions, and SiLU; sums and SiLU are float32 or wider.

    Attributes:
      kernel: [W, F], the weight of a position's own input last.
      bias: [F], or None.
      dtype: the dtype of inputs and kernel; None: the wider one of the two.
    """

    def __init__(self, features: int, settings: Mamba2Settings, *, rngs: nnx.Rngs):
        bound = settings.taps**-0.5
        kernel = jax.random.uniform(rngs.params(), (settings.taps, features), FLOAT32, -bound, bound)
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(jnp.zeros(features, FLOAT32)) if settings.conv_bias else None
        self.dtype: Any = None

    def __call__(
        self,
        x: Float[Array, "B T F"],
        segments: Int[Array, "B T"] | None,
        taps: Float[Array, "B W-1 F"] | None,
        lengths: Int[Array, " B"] | None,
    ) -> tuple[Float[Array, "B T F"], Float[Array, "B W-1 F"]]:
        """Computes the features, and the inputs that positions behind the last would read.

        Args:
          x: the inputs.
          segments: the number of each position's document: no input of another document is read.
          taps: the inputs before the first position; None: zeros.
          lengths: the number of positions that are not padding; all if None.
        """
        kernel = self.kernel[...]
        dtype = self.dtype or widest(x.dtype, kernel.dtype)
        wide, reach, length = widest(dtype, FLOAT32), kernel.shape[0] - 1, x.shape[1]
        x = x.astype(dtype)
        taps = jnp.zeros((x.shape[0], reach, x.shape[2]), dtype) if taps is None else taps.astype(dtype)
        whole = jnp.concatenate([taps, x], axis=1)
        terms = whole.astype(wide)  # once, so that the gradients of an input's uses are added in this dtype
        rows = jnp.broadcast_to(kernel.astype(dtype).astype(wide)[:, None, None], (reach + 1, *x.shape))
        total = jnp.zeros(x.shape, wide)
        for number in range(reach + 1):
            part = terms[:, number : number + length]
            if segments is not None and number < reach:
                padded = jnp.pad(segments, ((0, 0), (reach, 0)), constant_values=-1)[:, number : number + length]
                part = part * (padded == segments)[..., None].astype(wide)
            total = total + part * rows[number]
        if self.bias is not None:
            total = total + jnp.broadcast_to(self.bias[...].astype(wide), total.shape)
        places = jnp.arange(reach, dtype=jnp.int32)[None]
        places = places + (length if lengths is None else lengths.astype(jnp.int32)[:, None])
        after = jnp.take_along_axis(whole, jnp.broadcast_to(places, (x.shape[0], reach))[..., None], axis=1)
        return jax.nn.silu(total).astype(dtype), after


class StateSpace(nnx.Module):
    """The time steps of each position, and the rates of decay and the factors of each head.

    They are computed in `dtype`, which `apply_policy` sets to float32 by the rule `type:StateSpace`, in float16
    throughout too. What follows from them, sums, exponentials and states, is float32 or wider
    (`mpjax.models.mamba2.scan`).

    Attributes:
      log_rates: [H], the logarithms of the rates of decay.
      skip: [H], the factors of a position's own features in its result.
      step_bias: [H], what is added to the time steps before softplus.
    """

    def __init__(self, settings: Mamba2Settings, *, rngs: nnx.Rngs):
        heads, (low, high) = settings.heads, settings.initial_steps
        self.log_rates = nnx.Param(jnp.log(jnp.arange(1, heads + 1, dtype=FLOAT32)))
        self.skip = nnx.Param(jnp.ones(heads, FLOAT32))
        low, high = (math.log(max(step, 1e-4)) for step in (low, high))
        steps = jnp.exp(jax.random.uniform(rngs.params(), (heads,), FLOAT32, low, max(low, high)))
        self.step_bias = nnx.Param(steps + jnp.log(-jnp.expm1(-steps)))  # the inverse of softplus
        self.limits = settings.steps
        self.dtype: Any = None

    def __call__(
        self, steps: Float[Array, "B T H"], lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T H"], Float[Array, " H"], Float[Array, " H"]]:
        """Computes the time steps, the rates and the factors; steps of positions from `lengths[b]` on are 0."""
        dtype = self.dtype or widest(steps.dtype, FLOAT32)
        biases = jnp.broadcast_to(self.step_bias[...].astype(dtype), steps.shape)
        steps = jax.nn.softplus(steps.astype(dtype) + biases)
        low, high = self.limits
        steps = jnp.clip(steps, low if low > 0 else None, high if high < float("inf") else None)
        if lengths is not None:
            there = jnp.arange(steps.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
            steps = steps * there[..., None].astype(dtype)
        return steps, -jnp.exp(self.log_rates[...].astype(dtype)), self.skip[...].astype(dtype)


class GatedRMSNorm(RMSNorm):
    """An RMS norm of each group of features of x * silu(gate), in float32 or wider, with a scale for each feature."""

    def __init__(self, settings: Mamba2Settings, *, rngs: nnx.Rngs):
        super().__init__(settings.inner, epsilon=settings.epsilon, offset=0.0, rngs=rngs)
        self.groups = settings.groups

    def __call__(self, x: Float[Array, "*S I"], gate: Float[Array, "*S I"]) -> Float[Array, "*S I"]:  # pyright: ignore
        dtype = widest(x.dtype, gate.dtype, FLOAT32)
        gated = x.astype(dtype) * jax.nn.silu(gate.astype(dtype))
        grouped = gated.reshape(*x.shape[:-1], self.groups, -1)
        square = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
        normal = (grouped * jax.lax.rsqrt(square + jnp.asarray(self.epsilon, dtype))).reshape(x.shape)
        return (normal * jnp.broadcast_to(self.scale[...].astype(dtype), x.shape)).astype(gate.dtype)
