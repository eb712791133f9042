"""Chooses the next token from logits: the most probable one, or a random one of the probable."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int, Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen. The settings apply in the order in which they stand here.

    Attributes:
      temperature: the divisor of the logits; 0 takes the most probable token, and the first of several.
      top_k: the number of most probable tokens to choose from; 0 for all.
      top_p: the probability that the tokens to choose from have together, by the fewest tokens that reach it (Holtzman
        et al., "The Curious Case of Neural Text Degeneration", 2019, arXiv:1904.09751, section 3.1); 1 for all.

    Raises:
      UsageError: a setting is out of range, or one has no meaning because the temperature is 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        faults = [
            f"{name} is {value}: wanted {wanted}"
            for name, value, wanted, holds in (
                ("temperature", self.temperature, "0 or more", 0 <= self.temperature < math.inf),
                ("top_k", self.top_k, "0 or more", self.top_k >= 0),
                ("top_p", self.top_p, "more than 0 and at most 1", 0 < self.top_p <= 1),
            )
            if not holds
        ]
        if not faults and self.temperature == 0 and (self.top_k, self.top_p) != (0, 1):
            faults = [
                "temperature is 0, which takes the most probable token, so that top_k and top_p change nothing: set a "
                "temperature, such as 1, or leave them out"
            ]
        if faults:
            raise UsageError("\n".join(faults))


GREEDY = Sampling()


def sampled(sampling: Sampling, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
    """Chooses a token for each text, int32, from logits in float32 (or wider); `keys` are the random keys of the texts.

    A text's token depends on its own logits and key alone. Tokens as probable as the last of the `top_k` stay too.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(widest(logits.dtype, FLOAT32))
    # The difference first: a small temperature then makes -inf of improbable tokens, and not inf of probable ones.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / np.asarray(sampling.temperature, logits.dtype)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        last = jnp.sum(before < np.asarray(sampling.top_p, before.dtype), axis=-1, keepdims=True) - 1
        least = jnp.take_along_axis(ordered, jnp.maximum(last, 0), axis=-1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
