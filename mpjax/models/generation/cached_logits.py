"""The logits that generation computes for tokens that are given: those of its programs, not of a full forward pass."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.generation.programs import first_features, next_features, split
from mpjax.models.transformer import check_length


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


def through_cache(model: Any, tokens: Int[Array, "B T"], *, prompt: int = 1) -> Float[Array, "B T V"]:
    """Computes the logits of each next token as generation does: a prompt at once, then token by token from the cache.

    Args:
      model: a language model of mpjax under its policy, as for `generate`.
      tokens: int32 [B, T], without padding.
      prompt: the number of tokens to read at once.

    Raises:
      UsageError: the model cannot continue texts, a text is too long, or the prompt is not 1 to T tokens.
    """
    parts = split(model)
    tokens = jnp.asarray(tokens, jnp.int32)
    check_length(tokens, parts.length)
    if parts.documents is not None and bool(jnp.any(tokens[:, 1:] == parts.documents.end)):
        raise UsageError(
            f"a text has the end-of-text token {parts.documents.end} behind its first token, and the model keeps "
            "documents apart: wanted one document, as generation continues one"
        )
    if not 1 <= prompt <= tokens.shape[1]:
        raise UsageError(f"a prompt of {prompt} of {tokens.shape[1]} tokens: wanted 1 to {tokens.shape[1]}")
    return _logits(parts.graph, parts.form, prompt, parts.arrays, tokens)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _logits(graph: Any, form: Any, prompt: int, arrays: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
    model: Any = nnx.merge(graph, form.state(arrays))
    texts, size = tokens.shape
    features, cache = first_features(model, tokens[:, :prompt], size)

    def step(cache, column):
        token, position = column
        features, cache = next_features(model, token, jnp.broadcast_to(position, (texts,)), cache)
        return cache, model.logits(features)

    rest = tokens[:, prompt:].T, jnp.arange(prompt, size, dtype=jnp.int32)
    _, following = jax.lax.scan(step, cache, rest)
    return jnp.concatenate([model.logits(features), jnp.swapaxes(following, 0, 1)], axis=1)
