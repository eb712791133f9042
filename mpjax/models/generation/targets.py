"""Writes targets token by token, with the keys and values of the source and of the tokens before in a cache.

Two programs: one reads sources and draws the first token, the other draws one more.

Shapes: B batch, S slots of the cache, N heads, H features per head, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models.cross_attention import Change, Pair
from mpjax.models.generation.programs import Drawn, drawn_from, padded_length
from mpjax.models.generation.sampling import Sampling
from mpjax.models.remat import Rematerialised
from mpjax.models.scan import one_by_one
from mpjax.precision.calls import unwrap


class SplitTargets(NamedTuple):
    """A model of targets taken apart, for `mpjax.models.generation.continuations.generate`.

    The model has `tokens`, embeddings, and methods `encoded(*source)` and `logits(features)`; its `decoder` has
    `blocks` and a method `continued`, as in `mpjax.models.t5.network`.

    Attributes:
      graph: the NNX graph definition.
      state: the NNX state.
      vocabulary: V, the number of tokens that it knows.
      length: the largest number of tokens of a target, with those of `start`.
      start: the tokens that every target begins with; the first is the one that the decoder reads first.
      joined: makes of the sources of a batch what the model reads, and its number of positions, int32 [B], or None for
        sources that have all.
      check: raises UsageError for a source that the model cannot read: `(source, model, name=...)`.
      suppressed: tokens that are never drawn.
      suppressed_first: tokens that are not drawn right behind `start`.
      documents: None: a source is one document.
    """

    graph: Any
    state: Any
    vocabulary: int
    length: int
    start: tuple[int, ...]
    joined: Callable[[list[np.ndarray]], tuple[np.ndarray, np.ndarray | None]]
    check: Callable[..., None]
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    documents: None = None

    def room(self, source: np.ndarray) -> int:
        """The largest number of tokens behind `start`."""
        del source
        return self.length - len(self.start)

    def drawn(
        self, sources: list[np.ndarray], count: int, sampling: Sampling, keys: jax.Array, cast: Callable
    ) -> Iterator[Drawn]:
        """Yields the next tokens of all targets, `count` times, on the host. The device is a token ahead.

        Args:
          sources: the sources.
          count: the number of tokens to draw.
          sampling: how they are chosen.
          keys: the random key of each text.
          cast: the casts of a policy per operation; see `mpjax.training.make_train_step`.
        """
        source, lengths = self.joined(sources)
        # The last token is not read, so it needs no slot.
        size = padded_length(len(self.start) - 1 + count, self.length)
        suppressed = _Suppressed(len(self.start) - 1, self.suppressed, self.suppressed_first)
        read, step = _programs(self.graph, size, sampling, cast, suppressed)
        first, *others = (jnp.full(len(sources), token, jnp.int32) for token in self.start)
        drawn, progress = read(self.state, source, lengths, first, keys)
        for token in others:
            drawn, progress = step(self.state, progress._replace(tokens=token))
        for _ in range(count - 1):
            following, progress = step(self.state, progress)
            yield jax.device_get(drawn)
            drawn = following
        yield jax.device_get(drawn)


class _Suppressed(NamedTuple):
    """The tokens that are not drawn: `always`, and `first` behind the token at position `start`."""

    start: int
    always: tuple[int, ...]
    first: tuple[int, ...]

    def allowed(self, positions: jax.Array, vocabulary: int) -> jax.Array | None:
        """True for the tokens that may stand behind those at `positions`, bool [B, V]; None: all may."""
        if not (self.always or self.first):
            return None
        always, first = np.ones(vocabulary, bool), np.ones(vocabulary, bool)
        always[list(self.always)] = False
        first[list(self.first)] = False
        return jnp.asarray(always)[None] & (jnp.asarray(first)[None] | (positions != self.start)[:, None])


class _Progress(NamedTuple):
    """What a step takes and returns: for each block the keys and values of the tokens and of the source.

    `tokens` are the last ones, which the model has not read, at `positions`; all of them int32 [B].
    """

    cache: tuple[tuple[Pair, Pair], ...]
    tokens: jax.Array
    positions: jax.Array
    lengths: jax.Array | None
    keys: jax.Array


def apart_in_evaluation(model: Any) -> tuple[Any, Any]:
    """The graph and the state of a copy of a model of targets in evaluation mode, with single blocks.

    The model stays as it is.
    """
    model = one_by_one(model)
    model = nnx.merge(*nnx.split(model))
    for block in (*model.encoder.blocks, *model.decoder.blocks):
        unwrap(block, Rematerialised)  # nothing is kept for a backward pass, and keys and values leave the block
    model.eval()
    return nnx.split(model)


@functools.lru_cache(maxsize=16)
def _programs(
    graph: Any, size: int, sampling: Sampling, cast: Callable, suppressed: _Suppressed
) -> tuple[Callable, Callable]:
    def advanced(model: Any, source: Sequence[Any], before: Sequence[Any], at: _Progress) -> tuple[Drawn, _Progress]:
        kept: list[list[Pair]] = [[] for _ in before]

        def keeping(pairs: list[Pair], change: Change) -> Change:
            def call(keys: jax.Array, values: jax.Array) -> Pair:
                pairs.append(change(keys, values))
                return pairs[-1]

            return call

        changes = [
            (keeping(pairs, functools.partial(_written, pair, at.positions)), keeping(pairs, lambda *pair: pair))
            for pairs, pair in zip(kept, before, strict=True)
        ]
        features = model.decoder.continued(model.tokens(at.tokens), at.positions, size, at.lengths, source, changes)
        logits, following = model.logits(features), at.positions + 1
        allowed = suppressed.allowed(at.positions, logits.shape[-1])
        out = drawn_from(sampling, logits, jax.vmap(jax.random.fold_in)(at.keys, following), allowed)
        cache = tuple((tokens, of_source) for tokens, of_source in kept)
        return out, at._replace(cache=cache, tokens=out.tokens, positions=following)

    @jax.jit
    @cast
    def read(state, source, lengths, start, keys):
        model: Any = nnx.merge(graph, state)
        encoded = model.encoded(source) if lengths is None else model.encoded(source, lengths)
        depth = len(model.decoder.blocks)
        begun = _Progress((), start, jnp.zeros_like(start), lengths, keys)
        return advanced(model, [encoded] * depth, [None] * depth, begun)

    @functools.partial(jax.jit, donate_argnums=1)
    @cast
    def step(state, progress):
        model: Any = nnx.merge(graph, state)
        before, source = zip(*progress.cache, strict=True)
        return advanced(model, source, before, progress)

    def _written(before: Pair | None, positions: jax.Array, keys: jax.Array, values: jax.Array) -> Pair:
        """Adds the key and the value of one token, [B, 1, N, H] each, to those before it, [B, S, N, H]."""
        if before is None:
            room = ((0, 0), (0, size - 1), (0, 0), (0, 0))
            return jnp.pad(keys, room), jnp.pad(values, room)
        texts = jnp.arange(len(positions), dtype=jnp.int32)

        def put(slots: jax.Array, new: jax.Array) -> jax.Array:
            return slots.at[texts, positions].set(new[:, 0].astype(slots.dtype))

        return put(before[0], keys), put(before[1], values)

    return read, step
