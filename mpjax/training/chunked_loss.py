"""A loss over tokens, some tokens at a time, so that the logits of a vocabulary never exist for all tokens at once.

In shapes, B is the batch, T are the tokens of a text and D are the features of a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.precision.scaled_loss import expected_cotangent


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int, Num


def in_chunks(function: Callable, size: int, *arrays: Num[Array, "*S _"]) -> tuple[Float[Array, "*S"], ...]:
    """Applies a function to `size` tokens at a time, one chunk after the other, and joins the results.

    It is for evaluation: a derivative would keep the logits of all tokens.

    Args:
      function: `(*chunks) -> results`, each [size], of chunks [size, ...] of the arrays.
      size: the number of tokens in a chunk. Zeros fill up the last one.
      *arrays: [B, T, ...], aligned by token.

    Returns:
      The results for all tokens, each [B, T].
    """
    shape = arrays[0].shape[:2]
    results = jax.lax.map(lambda chunk: function(*chunk), tuple(_cut(x, size) for x in arrays))
    return jax.tree.map(lambda x: x.reshape(-1)[: math.prod(shape)].reshape(shape), results)


def sums_in_chunks(
    function: Callable, size: int, features: Float[Array, "B T D"], labels: Int[Array, "B T"], *, unit: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums a loss and a metric over all tokens, `size` tokens at a time; only the sum of the losses has gradients.

    The gradients of a chunk are computed right after its losses, for the cotangent `unit`. The backward pass multiplies
    them by the quotient of the cotangent and `unit`. Gradients of arrays that `function` closes over, such as a
    vocabulary, add up in float32 or wider.

    Args:
      function: `(features, labels) -> (losses, metrics)`, both floating [size], of chunks [size, D] and [size].
      size: the number of tokens in a chunk. Zeros fill up the last one, and do not count.
      features: floating [B, T, D].
      labels: integer [B, T].
      unit: the expected cotangent of the sum of the losses, float32, not 0. Half-precision gradients overflow or
        underflow as they would with this cotangent.

    Returns:
      The sum of the losses and the sum of the metrics over all tokens, scalars.
    """
    first, *rest = (_cut(x, size) for x in (features, labels, jnp.full(labels.shape, True)))
    function, closed_over = jax.closure_convert(function, first[0], rest[0][0])
    return _sums(function, unit, first, tuple(closed_over), tuple(rest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(
    function: Callable, unit: jax.Array, features: jax.Array, closed_over: tuple, rest: tuple
) -> tuple[jax.Array, jax.Array]:
    """Computes `sums_in_chunks` of features [chunks, size, D]; `rest` has the labels and the mask of counted tokens."""
    return _sums_and_gradients(function, unit, features, closed_over, rest)[0]


def _sums_and_gradients(
    function: Callable, unit: jax.Array, features: jax.Array, closed_over: tuple, rest: tuple
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    """The forward rule of `_sums`: computes the sums, and saves the gradients of `unit` times the sum of the losses."""

    def add(total: tuple, chunk: tuple) -> tuple[tuple, tuple]:
        features, (labels, counts) = chunk

        def loss(features: jax.Array, closed_over: tuple) -> tuple[jax.Array, tuple]:
            losses, metrics = (jnp.where(counts, x, 0) for x in function(features, labels, *closed_over))
            sums = jnp.sum(losses), jnp.sum(metrics)
            return unit.astype(losses.dtype) * sums[0], sums

        (gradient, gradients), sums = jax.grad(loss, (0, 1), has_aux=True)(features, closed_over)
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, gradients), (gradient, sums)

    zeros = tuple(jnp.zeros(x.shape, widest(x.dtype, FLOAT32)) for x in closed_over)
    gradients, (gradient, sums) = jax.lax.scan(add, zeros, (features, rest))
    return (jnp.sum(sums[0]), jnp.sum(sums[1])), (unit, gradient, gradients, closed_over)


def _scaled_gradients(function: Callable, saved: tuple, cotangents: tuple) -> tuple:
    """The backward rule of `_sums`: multiplies the saved gradients by the cotangent of the losses' sum over `unit`."""
    del function
    unit, gradient, gradients, closed_over = saved
    ratio = cotangents[0] / unit.astype(cotangents[0].dtype)

    def scaled(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        wide_dtype = widest(x.dtype, FLOAT32)
        return (ratio.astype(wide_dtype) * x.astype(wide_dtype)).astype(dtype)

    return None, scaled(gradient, gradient.dtype), tuple(map(scaled, gradients, [x.dtype for x in closed_over])), None


_sums.defvjp(_sums_and_gradients, _scaled_gradients)


def _cut(x: jax.Array, size: int) -> jax.Array:
    """Divides the tokens of [B, T, ...] into chunks: [chunks, size, ...]. Zeros fill up the last one."""
    flat = x.reshape(-1, *x.shape[2:])
    padded = jnp.pad(flat, [(0, -len(flat) % size), *[(0, 0)] * (flat.ndim - 1)])
    return padded.reshape(-1, size, *flat.shape[1:])


def token_cotangent(tokens: int) -> Float[Array, ""]:
    """The cotangent of one token's loss in a mean over `tokens` tokens, float32: the loss scale divided by `tokens`.

    The loss scale is the value of the innermost `loss_cotangent`, 1 outside of all.
    """
    return jnp.asarray(expected_cotangent(), FLOAT32) / tokens
