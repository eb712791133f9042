"""The recurrence of Mamba-2, by chunks: inside a chunk as products of matrices, from chunk to chunk as a loop.

Dao & Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
2024 (arXiv:2405.21060), section 6. With h the state of a head, d the time step and a < 0 the rate of decay:
h_t = exp(d_t a) h_(t-1) + d_t x_t B_t, and y_t = C_t h_t.

Rates are added up over a chunk, and exponentials of differences of these sums are what remains of earlier positions.
The sum of 512 times -0.1 in bfloat16 ends at -51.5, and its last differences are 0 or -0.25. So sums, exponentials, and
the states from chunk to chunk are float32 or wider; the operands of products have the dtype of x.

Shapes: B batch, T positions, H heads, P features of a head, G groups, E = H / G heads of a group, N states,
C chunks, Q positions of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.precision.layers import DOT_GENERAL


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Bool, Float, Int


def state_space(
    x: Float[Array, "B T H P"],
    steps: Float[Array, "B T H"],
    rates: Float[Array, " H"],
    inputs: Float[Array, "B T G N"],
    outputs: Float[Array, "B T G N"],
    *,
    chunk: int,
    before: Float[Array, "B H P N"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H P N"]]:
    """Runs the recurrence over all positions; results are float32 or wider.

    Args:
      x: the features, in the dtype of the products.
      steps: d, float32 or wider. A step of 0 leaves the state as it is.
      rates: a, negative, in the dtype of the steps.
      inputs: B, in the dtype of x.
      outputs: C, in the dtype of x.
      chunk: Q.
      before: the state before the first position; None: zeros.
      segments: the number of each position's document, which never falls; the state is zero before the first position
        of each. None: one document, that of `before`.

    Returns:
      y, and the state after the last position.
    """
    batch, length, heads, features = x.shape
    groups, states, wide = inputs.shape[2], inputs.shape[3], widest(steps.dtype, rates.dtype, FLOAT32)
    each, size = heads // groups, min(chunk, length)
    count = -(-length // size)
    room = count * size - length

    def chunked(array: jax.Array, *tail: int) -> jax.Array:
        """[B, T, ...] to [B, C, Q, *tail]; positions behind the last are zeros, whose steps change nothing."""
        padded = jnp.pad(array, [(0, 0), (0, room), *[(0, 0)] * (array.ndim - 2)])
        return padded.reshape(batch, count, size, *tail)

    # From here on, [B, C, G, E, Q, ...] and [B, C, G, Q, ...].
    step = chunked(steps.astype(wide), groups, each).transpose(0, 1, 3, 4, 2)
    fed = chunked(x, groups, each, features).transpose(0, 1, 3, 4, 2, 5).astype(wide) * step[..., None]
    inputs, outputs = (chunked(array, groups, states).transpose(0, 1, 3, 2, 4) for array in (inputs, outputs))
    total = jnp.cumsum(step * rates.astype(wide).reshape(1, 1, groups, each, 1), axis=-1)
    stays, enters, leaves = _alike(_chunked_segments(segments, count, size, room))

    # Inside a chunk.
    decay = total[..., :, None] - total[..., None, :]
    decay = jnp.exp(jnp.where(stays, decay, jnp.full_like(decay, -jnp.inf)))
    shared = DOT_GENERAL(outputs, inputs, (((4,), (4,)), ((0, 1, 2), (0, 1, 2))))
    mixed = (shared.astype(wide)[:, :, :, None] * decay).astype(x.dtype)
    y = DOT_GENERAL(mixed, fed.astype(x.dtype), (((5,), (4,)), ((0, 1, 2, 3), (0, 1, 2, 3)))).astype(wide)

    # What each chunk adds to the state, and the state before each.
    left = jnp.exp(jnp.where(leaves, total[..., -1:] - total, jnp.full_like(total, -jnp.inf)))
    added = (fed * left[..., None]).astype(x.dtype)
    added = DOT_GENERAL(added, inputs, (((4,), (3,)), ((0, 1, 2), (0, 1, 2)))).astype(wide)
    over = jnp.exp(total[..., -1]) * enters[..., -1].astype(wide)

    def follow(state: jax.Array, of_chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        add, keep = of_chunk
        return state * keep[..., None, None] + add, state

    first = jnp.zeros((batch, groups, each, features, states), wide)
    if before is not None:
        first = before.astype(wide).reshape(first.shape)
    last, earlier = jax.lax.scan(follow, first, (jnp.moveaxis(added, 1, 0), jnp.moveaxis(over, 1, 0)))
    earlier = jnp.moveaxis(earlier, 0, 1)

    # From the state before a chunk to its positions: [B, C, G, Q, E, P].
    carried = DOT_GENERAL(outputs, earlier.astype(x.dtype), (((4,), (5,)), ((0, 1, 2), (0, 1, 2)))).astype(wide)
    remains = jnp.exp(total) * enters.astype(wide)
    y = y + carried.transpose(0, 1, 2, 4, 3, 5) * remains[..., None]
    y = y.transpose(0, 1, 4, 2, 3, 5).reshape(batch, count * size, heads, features)[:, :length]
    return y, last.reshape(batch, heads, features, states)


def _chunked_segments(segments: Int[Array, "B T"] | None, count: int, size: int, room: int) -> Int[Array, "_ C Q"]:
    """Divides the documents of positions into chunks; positions behind the last are of the last document."""
    if segments is None:
        return jnp.zeros((1, count, size), jnp.int32)
    return jnp.pad(segments, [(0, 0), (0, room)], mode="edge").reshape(-1, count, size)


def _alike(segments: Int[Array, "_ C Q"]) -> tuple[Bool[Array, ...], ...]:
    """Says which positions are of one document.

    Returns:
      Whether each position sees each one up to itself [_, C, 1, 1, Q, Q], whether it sees the state before the chunk
      [_, C, 1, 1, Q], and whether the state behind the chunk has it [_, C, 1, 1, Q].
    """
    causal = jnp.tril(jnp.ones((segments.shape[-1],) * 2, bool))[None, None]
    stays = jnp.logical_and(segments[..., :, None] == segments[..., None, :], causal)
    # The state before a row is that of its first document.
    before = jnp.concatenate([segments[:, :1, 0], segments[:, :-1, -1]], axis=1)
    enters, leaves = segments == before[..., None], segments == segments[..., -1:]
    return tuple(array[:, :, None, None] for array in (stays, enters, leaves))
