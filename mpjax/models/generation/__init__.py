"""Continues texts with a language model, token by token, with the keys and values of earlier tokens in a cache."""

from mpjax.models.generation.cached_logits import through_cache
from mpjax.models.generation.continuations import Continuation, generate
from mpjax.models.generation.sampling import GREEDY, Sampling


__all__ = ["GREEDY", "Continuation", "Sampling", "generate", "through_cache"]
