"""The softmax cross entropy with labels, exact and in float32, for vocabularies whose logits fill a GPU's memory.

In shapes, ... are the labelled positions, such as B, H, W or T, and K are the classes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int, Num


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_labels(smoothing: float, logits: Float[Array, "*S K"], labels: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes the cross entropy with labels, in float32 or wider.

    Labels are compared with an iota. A gather of a logit and the scatter of its gradient would make XLA write all
    logits to memory in float32.
    """
    return _Softmax.of(logits, labels).loss(smoothing)


@with_labels.defjvp
def _with_labels_jvp(smoothing: float, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    softmax = _Softmax.of(*primals)
    return softmax.loss(smoothing), jnp.sum(widened(tangents[0]) * softmax.slope(smoothing), axis=-1)


class _Softmax(NamedTuple):
    """A softmax and its labels, in float32 or wider.

    Attributes:
      shifted: the logits minus the largest, [..., K].
      log_total: the log of the sum of their exponentials, [...].
      own: bool [..., K], True at the label.
      valid: bool [...], True where the label is a class.
    """

    shifted: jax.Array
    log_total: jax.Array
    own: jax.Array
    valid: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, labels: jax.Array) -> _Softmax:
        logits, labels = widened(logits), labels.astype(jnp.int32)
        shifted = _shifted(logits)
        return cls(
            shifted=shifted,
            log_total=jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)),
            own=labels[..., None] == _classes(logits),
            valid=(labels >= 0) & (labels < logits.shape[-1]),
        )

    def loss(self, smoothing: float) -> jax.Array:
        """The cross entropy [...]; NaN where the label is no class."""
        loss = self.log_total - (1 - smoothing) * jnp.sum(jnp.where(self.own, self.shifted, 0), axis=-1)
        if smoothing:
            loss -= smoothing * jnp.mean(self.shifted, axis=-1)
        return jnp.where(self.valid, loss, jnp.nan)

    def slope(self, smoothing: float) -> jax.Array:
        """The derivative of the loss by the logits, [..., K]: the probabilities minus the target."""
        even = smoothing / self.shifted.shape[-1]
        target = jnp.where(self.own, 1 - smoothing + even, even)
        slope = jnp.exp(self.shifted - self.log_total[..., None]) - target
        return jnp.where(self.valid[..., None], slope, jnp.nan)


def predicted(logits: Float[Array, "*S K"]) -> Int[Array, "*S"]:
    """The first class with the largest logit; K, which is no class, if that logit is infinite or any logit is NaN.

    It shares the two passes of the loss over the logits of a vocabulary. An argmax would add a third pass.
    """
    logits = widened(logits)
    shifted, classes, none = _shifted(logits), _classes(logits), logits.shape[-1]
    first = jnp.min(jnp.where(shifted == 0, classes, none), axis=-1)
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), first, none)


def _shifted(logits: jax.Array) -> jax.Array:
    """Subtracts the largest logit, if that is finite."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return logits - jnp.where(jnp.isfinite(largest), largest, 0)


def _classes(logits: jax.Array) -> jax.Array:
    """The class numbers, int32 [1, ..., 1, K]."""
    return jnp.arange(logits.shape[-1], dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (-1,))


def widened(logits: jax.Array) -> jax.Array:
    """Casts logits to float32, or keeps a wider dtype."""
    return logits.astype(widest(logits.dtype, FLOAT32))


def in_chunks(function: Callable, size: int, *arrays: Num[Array, "*S _"]) -> tuple[Float[Array, "*S"], ...]:
    """Applies a function to `size` tokens at a time; the backward pass computes each chunk again.

    With the product of features and a vocabulary in `function`, logits never exist for all tokens at once. Gradients of
    the vocabulary add up chunk by chunk, in the dtype of the parameter.

    Args:
      function: `(*chunks) -> results`, each [size], of chunks [size, ...] of the arrays.
      size: the number of tokens in a chunk.
      *arrays: [B, T, ...], aligned by token.

    Returns:
      The results for all tokens, each [B, T].
    """
    shape = arrays[0].shape[:2]
    tokens = math.prod(shape)
    chunks = -(-tokens // size)

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(tokens, *x.shape[2:])
        padded = jnp.pad(flat, [(0, chunks * size - tokens), *[(0, 0)] * (flat.ndim - 1)])
        return padded.reshape(chunks, size, *flat.shape[1:])

    results = jax.lax.map(jax.checkpoint(lambda each: function(*each)), tuple(map(cut, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1)[:tokens].reshape(shape), results)
