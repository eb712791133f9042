"""Compares which experts a decoder's routers choose under two policies: a flip is a token with another set of experts.

Shapes: B batch, T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.decoder.experts import Routings
from mpjax.models.scan import one_by_one
from mpjax.precision.modules import apply_policy
from mpjax.precision.policy import Policy


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFlips:
    """The flips of one layer.

    Attributes:
      layer: the number of the layer among those with experts, from 0.
      flipped: the share of tokens whose set of experts differs; NaN without tokens.
      margin: the mean margin of all tokens: the probability of the last chosen expert minus that of the first one that
        is not chosen, in the first pass.
      flipped_margin: the largest margin of a flipped token; NaN without flips.
    """

    layer: int
    flipped: float
    margin: float
    flipped_margin: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFlips:
    """Which tokens have other experts under a second policy. `print` it for a table of the layers.

    Attributes:
      tokens: the number of tokens that were compared.
      flipped: the share of pairs of token and layer whose set of experts differs.
      anywhere: the share of tokens with a flip in some layer.
      layers: the flips of each layer with experts.
    """

    tokens: int
    flipped: float
    anywhere: float
    layers: tuple[LayerFlips, ...]

    def __str__(self) -> str:
        head = f"{self.tokens} tokens: {self.flipped:.2%} of choices flip, {self.anywhere:.2%} of tokens in some layer"
        rows = [
            f"layer {row.layer}: {row.flipped:.2%} flip; margin {row.margin:.4f} on average, at most "
            f"{row.flipped_margin:.4f} where they flip"
            for row in self.layers
        ]
        return "\n".join([head, *rows])


def expert_flips(
    model: Any,
    tokens: Int[Array, "B T"],
    first: str | Policy = "float32",
    second: str | Policy = "mixed_bfloat16",
    *,
    lengths: Int[Array, " B"] | None = None,
) -> ExpertFlips:
    """Runs a decoder with experts under two policies, and compares the sets of experts that its routers choose.

    The model stays as it is. A policy of rules alone tells routers apart from all else: with the rule
    `"type:Router": "bfloat16"`, only routers compute in bfloat16.

    Args:
      model: a `mpjax.models.decoder.Decoder` with experts.
      tokens: int32 [B, T].
      first: the policy that counts as right.
      second: the other policy.
      lengths: int32 [B], the number of tokens of each text that are not padding, which are compared; all if None.

    Raises:
      UsageError: the model has no experts, there is no token or one outside of the vocabulary, or a probability is not
        finite.
    """
    if getattr(getattr(model, "settings", None), "experts", None) is None:
        raise UsageError(f"{type(model).__name__} has no experts whose choice could flip")
    tokens, vocabulary = jnp.asarray(tokens), model.settings.vocabulary
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UsageError(f"expert_flips: tokens are {tokens.dtype}{list(tokens.shape)}; wanted integers [B, T]")
    if tokens.size and not 0 <= jnp.min(tokens) <= jnp.max(tokens) < vocabulary:
        raise UsageError(f"expert_flips: tokens from {jnp.min(tokens)} to {jnp.max(tokens)} of {vocabulary}")
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    there = np.ones(tokens.shape, bool)
    if lengths is not None:
        there = np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]
    if not there.any():
        raise UsageError(f"expert_flips has no tokens to compare: tokens are {tokens.shape}")
    sides = [_routings(model, policy, tokens, lengths) for policy in (first, second)]
    rows, flips = [], []
    for number, (one, other) in enumerate(zip(*sides, strict=True)):
        for side, policy in ((one, first), (other, second)):
            if not np.isfinite(np.asarray(side.chances, np.float64)[there]).all():
                raise UsageError(f"expert_flips: under {policy}, the router of layer {number} is not finite")
        flip = np.any(np.sort(one.chosen, axis=-1) != np.sort(other.chosen, axis=-1), axis=-1)[there]
        ordered = np.sort(np.asarray(one.chances, np.float64), axis=-1)[there]
        each = one.chosen.shape[-1]
        all_chosen = each == ordered.shape[-1]
        margins = np.full(len(ordered), np.inf) if all_chosen else ordered[:, -each] - ordered[:, -each - 1]
        rows.append(
            LayerFlips(
                layer=number,
                flipped=float(np.mean(flip)),
                margin=float(np.mean(margins)),
                flipped_margin=float(np.max(margins[flip])) if flip.any() else float("nan"),
            )
        )
        flips.append(flip)
    return ExpertFlips(
        tokens=int(there.sum()),
        flipped=float(np.mean(flips)),
        anywhere=float(np.mean(np.any(flips, axis=0))),
        layers=tuple(rows),
    )


def _routings(model: Any, policy: str | Policy, tokens: jax.Array, lengths: jax.Array | None) -> list[Any]:
    """What the routers of a copy of the model decide under a policy, as arrays of NumPy, layer by layer."""
    model = nnx.merge(*nnx.split(one_by_one(model)))
    apply_policy(model, policy)
    return list(jax.device_get(_decided(model, tokens, lengths)).layers)


@nnx.jit
def _decided(model: Any, tokens: jax.Array, lengths: jax.Array | None) -> Routings:
    return model.features_and_load(tokens, Routings(), lengths)[1]
