"""Dot-product attention with products in the input dtype, and scores and softmax in float32, on every device.

Flax's own attention (0.12) computes the softmax in half precision when there is dropout. Without dropout it calls
`jax.nn`'s attention, whose float16 products do not compile on a CPU (jax 0.10 to 0.12) and whose backward pass widens
operands.

Shapes: B batch axes (any number), T queries, S keys, N heads, K key and value heads (N is a multiple of K), H features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import FLOAT32, HALF, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    cap: float | None = None,
    then: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> Float[Array, "B T N H"]:
    """Computes scaled dot-product attention.

    Source: Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762), equation 1.

    A query whose keys are all masked gets the mean of the values, because all its scores are the lowest finite number.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].
      bias: a term added to the scores; broadcasts to [B, N, T, S].
      mask: False where a query must not attend to a key; broadcasts to [B, N, T, S].
      is_causal: if True, a query attends only to keys up to its own position.
      scale: the factor of the scores; None: 1 / sqrt(H).
      cap: the limit c of the scaled scores s, which become c tanh(s / c), before `bias`; None: no limit.
      then: a function of the float32 weights [B, N, T, S], applied before they are multiplied by the values.

    Returns:
      [B, T, N, H] in the dtype of `value`.
    """
    scores = _scores(query, key)
    scores = scores * np.asarray(1 / math.sqrt(query.shape[-1]) if scale is None else scale, scores.dtype)
    if cap is not None:
        scores = soft_cap(scores, cap)
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, scores.shape).astype(scores.dtype)
    if is_causal:
        earlier = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = earlier if mask is None else jnp.logical_and(*jnp.broadcast_arrays(mask.astype(bool), earlier))
    if mask is not None:
        lowest = jnp.full_like(scores, jnp.finfo(scores.dtype).min)
        scores = jax.lax.select(jnp.broadcast_to(mask.astype(bool), scores.shape), scores, lowest)
    weights = then(_softmax(scores))
    return _weighted(weights.astype(value.dtype), value)


def soft_cap(x: Float[Array, "*S"], cap: float) -> Float[Array, "*S"]:
    """Computes cap tanh(x / cap) in float32 (or wider), which keeps values between -cap and cap.

    Source: "Gemma 2: Improving Open Language Models at a Practical Size", 2024 (arXiv:2408.00118), section 2.
    """
    x = x.astype(widest(x.dtype, FLOAT32))
    limit = jnp.asarray(cap, x.dtype)
    return limit * jnp.tanh(x / limit)


@jax.custom_jvp
def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Computes the scores [B, N, T, S] in float32 (or wider), because a score can overflow float16."""
    return _queries_by_keys(query, key, widest(query.dtype, FLOAT32))


@_scores.defjvp
def _scores_jvp(primals, tangents):
    """Computes tangent products in the input dtype; JAX's own rule would widen operands in the backward pass."""
    (query, key), (query_slope, key_slope) = primals, tangents
    scores = _scores(query, key)
    slope = _queries_by_keys(query_slope, key, key.dtype) + _queries_by_keys(query, key_slope, query.dtype)
    return scores, slope.astype(scores.dtype)


def _softmax(scores: jax.Array) -> jax.Array:
    """Computes `jax.nn.softmax` without tracing the derivative of the maximum, which cancels out."""
    powers = jnp.exp(scores - jnp.max(jax.lax.stop_gradient(scores), axis=-1, keepdims=True))
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


def _queries_by_keys(query: jax.Array, key: jax.Array, dtype) -> jax.Array:
    """Multiplies queries [B, T, N, H] by keys [B, S, K, H]; returns [B, N, T, S].

    The queries of the N / K heads that share a key are the rows of one product. So the gradient of the key is a sum
    inside a product, which adds in float32; copies of the key would be summed in the dtype of the inputs.
    """
    batch, shared = tuple(range(key.ndim - 3)), key.shape[-2]
    if query.shape[-2] > shared:
        grouped = query.reshape(*query.shape[:-2], shared, -1, query.shape[-1])
        query = jnp.moveaxis(grouped, -4, -2)  # [B, K, N / K, T, H]
        heads = (*batch, query.ndim - 4), (*batch, key.ndim - 2)
    else:
        heads = (*batch, query.ndim - 2), (*batch, key.ndim - 2)
    pairs = (query.ndim - 1,), (key.ndim - 1,)
    scores = jax.lax.dot_general(query, key, (pairs, heads), preferred_element_type=dtype)
    return scores.reshape(*scores.shape[: len(batch)], -1, *scores.shape[-2:])


def _weighted(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Multiplies weights [B, N, T, S] by values [B, S, K, H]; returns [B, T, N, H]."""
    batch, shared = tuple(range(value.ndim - 3)), value.shape[-2]
    if weights.shape[-3] > shared:
        weights = weights.reshape(*weights.shape[:-3], shared, -1, *weights.shape[-2:])  # [B, K, N / K, T, S]
    heads = (*batch, len(batch)), (*batch, value.ndim - 2)
    pairs = (weights.ndim - 1,), (value.ndim - 3,)
    result = jax.lax.dot_general(weights, value, (pairs, heads))
    return jnp.swapaxes(result.reshape(*result.shape[: len(batch)], -1, *result.shape[-2:]), -3, -2)


def flax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype=None,
    precision=None,
    module=None,
    promote_dtype: Callable | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Calls `dot_product_attention` with the signature of Flax's own attention, and applies dropout like Flax.

    With `broadcast_dropout` all batch axes and heads share one dropout mask. Without a `dropout_rng` nothing drops.
    The computation is in `dtype`, or in the dtype of `query`. `module` sows the weights, as they are before dropout.
    `precision`, which only concerns float32 on tensor cores, and `promote_dtype` are ignored.
    """
    dtype = query.dtype if dtype is None else dtype
    query, key, value = (x.astype(dtype) for x in (query, key, value))

    def then(weights: jax.Array) -> jax.Array:
        if module is not None:
            from flax import nnx

            module.sow(nnx.Intermediate, "attention_weights", weights.astype(dtype))
        if deterministic or dropout_rate == 0.0 or dropout_rng is None:
            return weights
        shape = (1,) * (weights.ndim - 2) + weights.shape[-2:] if broadcast_dropout else weights.shape
        kept = jnp.broadcast_to(jax.random.bernoulli(dropout_rng, 1 - dropout_rate, shape), weights.shape)
        return jnp.where(kept, weights / (1 - dropout_rate), 0.0)

    return dot_product_attention(query, key, value, bias=bias, mask=mask, is_causal=is_causal, then=then)


def attention_fn_for(attention_fn: Callable, dtype: np.dtype) -> Callable:
    """Selects the attention function for a Flax layer that computes in `dtype`.

    In half precision, `flax_attention` replaces Flax's function. The user's own function stays.
    """
    from flax import nnx

    if attention_fn not in (nnx.dot_product_attention, flax_attention):
        return attention_fn
    return flax_attention if dtype in HALF else nnx.dot_product_attention
