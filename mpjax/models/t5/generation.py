"""Writes targets token by token, with the keys and values of the source and of the tokens before in a cache.

Two programs: one reads sources and draws the first token, the other draws one more.

Shapes: B batch, T tokens of the source, S slots of the cache, N heads, H features per head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models.generation.programs import Drawn, drawn_from, padded_length
from mpjax.models.generation.sampling import Sampling
from mpjax.models.remat import Rematerialised
from mpjax.models.scan import one_by_one
from mpjax.models.t5.network import T5, Change, Pair
from mpjax.precision.calls import unwrap


LONGEST = 1 << 30
"""The largest number of tokens: distances between positions have no end."""


class SplitT5(NamedTuple):
    """A T5 taken apart, for `mpjax.models.generation.continuations.generate`.

    Attributes:
      graph: the NNX graph definition.
      state: the NNX state.
      vocabulary: the number of tokens that it knows.
      length: the largest number of tokens in a text.
      documents: None: a source is one document.
    """

    graph: Any
    state: Any
    vocabulary: int
    length: int = LONGEST
    documents: None = None

    def drawn(
        self, token_arrays: list[np.ndarray], count: int, sampling: Sampling, keys: jax.Array, cast: Callable
    ) -> Iterator[Drawn]:
        """Yields the next tokens of all targets, `count` times, on the host. The device is a token ahead.

        Args:
          token_arrays: the tokens of each source.
          count: the number of tokens to draw.
          sampling: how they are chosen.
          keys: the random key of each text.
          cast: the casts of a policy per operation; see `mpjax.training.make_train_step`.
        """
        lengths = np.asarray([len(row) for row in token_arrays], np.int32)
        tokens = np.zeros((len(token_arrays), padded_length(int(lengths.max()), LONGEST)), np.int32)
        for number, row in enumerate(token_arrays):
            tokens[number, : len(row)] = row
        read, step = _programs(self.graph, padded_length(count, LONGEST), sampling, cast)
        drawn, progress = read(self.state, tokens, lengths, keys)
        for _ in range(count - 1):
            following, progress = step(self.state, progress)
            yield jax.device_get(drawn)
            drawn = following
        yield jax.device_get(drawn)


class _Progress(NamedTuple):
    """What a step takes and returns: for each block the keys and values of the tokens and of the source.

    `tokens` are the last ones, which the model has not read, at `positions`; all of them int32 [B].
    """

    cache: tuple[tuple[Pair, Pair], ...]
    tokens: jax.Array
    positions: jax.Array
    lengths: jax.Array
    keys: jax.Array


def split_t5(model: T5) -> SplitT5:
    """Takes a T5 apart. The model stays as it is; its copy is in evaluation mode."""
    model = one_by_one(model)
    model = nnx.merge(*nnx.split(model))
    for block in (*model.encoder.blocks, *model.decoder.blocks):
        unwrap(block, Rematerialised)  # nothing is kept for a backward pass, and keys and values leave the block
    model.eval()
    return SplitT5(*nnx.split(model), vocabulary=model.settings.vocabulary)


@functools.lru_cache(maxsize=16)
def _programs(graph: Any, size: int, sampling: Sampling, cast: Callable) -> tuple[Callable, Callable]:
    def advanced(model: T5, source: Sequence[Any], before: Sequence[Any], at: _Progress) -> tuple[Drawn, _Progress]:
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
        following = at.positions + 1
        out = drawn_from(sampling, model.logits(features), jax.vmap(jax.random.fold_in)(at.keys, following))
        cache = tuple((tokens, of_source) for tokens, of_source in kept)
        return out, at._replace(cache=cache, tokens=out.tokens, positions=following)

    @jax.jit
    @cast
    def read(state, tokens, lengths, keys):
        model: Any = nnx.merge(graph, state)
        start = jnp.full_like(lengths, model.settings.start)
        source, depth = model.encoded(tokens, lengths), len(model.decoder.blocks)
        begun = _Progress((), start, jnp.zeros_like(lengths), lengths, keys)
        return advanced(model, [source] * depth, [None] * depth, begun)

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
