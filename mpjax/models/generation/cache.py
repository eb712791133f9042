"""The keys and values of the tokens that a model has read, and attention over them.

A token's key stands at its position in the text. Texts are padded on the right, and the keys of padding are replaced
before a later token sees them: a token sees the positions up to its own.

Shapes: B batch, T tokens, S slots, N query heads, K key and value heads, H features per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.models.attention import Implementation, attend
from mpjax.precision.attention import dot_product_attention


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Int


class Slots(NamedTuple):
    """The keys and values of one block, each [B, S, K, H], in the dtype that its attention computes in."""

    keys: jax.Array
    values: jax.Array


class Reads:
    """Attention of the first tokens of texts, from position 0 on, which keeps their keys and values.

    It is `attend`, and called once. Afterwards, `kept` has room for `size` tokens.
    """

    kept: Slots

    def __init__(self, size: int):
        self._size = size

    def __call__(self, query, key, value, *, lengths=None, **settings) -> jax.Array:
        """Computes attention [B, T, N, H] among the tokens."""
        room = ((0, 0), (0, self._size - key.shape[1]), (0, 0), (0, 0))
        self.kept = Slots(jnp.pad(key, room), jnp.pad(value, room))
        return attend(query, key, value, lengths=lengths, **settings)


class Continues:
    """Attention of one more token of each text, over the tokens before it and itself.

    It is called once. Afterwards, `kept` has the key and the value of the token too. A token whose position has no slot
    is not kept.

    Args:
      slots: the keys and values of the tokens before it.
      positions: int32 [B], the position of the token in each text.
    """

    kept: Slots

    def __init__(self, slots: Slots, positions: Int[Array, " B"]):
        self._slots = slots
        self._positions = positions

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segments: jax.Array | None = None,
        is_causal: bool = True,
        window: int | jax.Array | None = None,
        scale: float | None = None,
        cap: float | None = None,
        implementation: Implementation = "auto",
    ) -> jax.Array:
        """Computes attention [B, 1, N, H]. One query has no use for a fused kernel, so `implementation` is not read."""
        del lengths, implementation
        if not is_causal:
            raise ValueError("a token cannot attend to later ones while they are generated: write is_causal=True")
        if segments is not None:
            raise ValueError("the cache has the tokens of one document: leave segments out")
        self.kept = Slots(self._written(self._slots.keys, key), self._written(self._slots.values, value))
        slots = jnp.arange(self.kept.keys.shape[1], dtype=jnp.int32)[None]
        at = self._positions[:, None]
        visible = slots <= at
        if window is not None:
            visible = jnp.logical_and(visible, slots > at - jnp.asarray(window, jnp.int32))
        keys, values = (array.astype(query.dtype) for array in self.kept)
        return dot_product_attention(query, keys, values, mask=visible[:, None, None, :], scale=scale, cap=cap)

    def _written(self, slots: jax.Array, new: jax.Array) -> jax.Array:
        texts = jnp.arange(slots.shape[0], dtype=jnp.int32)
        return slots.at[texts, self._positions].set(new[:, 0].astype(slots.dtype), mode="drop", unique_indices=True)
