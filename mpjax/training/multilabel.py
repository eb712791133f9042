"""The objective of several labels at once: sigmoid cross entropy in float32, and F1 scores of a whole set.

In shapes, B is the batch and K the number of labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.precision.policy import Policy
from mpjax.training.objective import OUTPUTS, Batch, Mean, Values, inputs_in
from mpjax.training.softmax_cross_entropy import as_float32


if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from mpjax.extend import Objective


def sigmoid_cross_entropy(logits: Float[Array, "B K"], labels: Int[Array, "B K"]) -> Float[Array, " B"]:
    """Computes the binary cross entropy of each example, the mean over its labels of 0 and 1.

    Returns:
      float32 (or wider) [B]; finite for every finite logit, and 0 for an infinite one of the right sign.
    """
    logits = as_float32(logits)
    return jnp.mean(jax.nn.softplus(jnp.where(labels == 1, -logits, logits)), axis=-1)


def applies(logits: Float[Array, "B K"], labels: Int[Array, "B K"]) -> Bool[Array, "B K"]:
    """The predicted labels: those with a logit above 0; where it is NaN or infinite, the wrong one."""
    return jnp.where(jnp.isfinite(logits), logits > 0, labels == 0)


def multilabel_in_order(metrics: dict[str, float]) -> dict[str, float]:
    """Copies the metrics of a set in order: `loss`, `f1`, `macro_f1`, `exact`, then others."""
    return {name: metrics[name] for name in ("loss", "f1", "macro_f1", "exact")} | metrics


def multilabel_objective(policy: Policy) -> Objective:
    """Creates the objective of several labels, with the logits of the model as its `outputs`.

    Batches hold `image` or `row`, which is cast to the compute dtype, and `labels`, int32 [B, K] of 0 and 1; the model
    returns logits [B, K]. Values are `loss` [B], and of the whole set `f1` (over all labels), `macro_f1` (the mean over
    the labels that occur or are predicted) and `exact`, the share of examples all of whose labels are right.
    """

    def values_of(model, batch: Batch, key: jax.Array | None) -> Values:
        labels = batch["labels"]
        logits = model(*inputs_in(batch, "multilabel", policy))
        chosen, there = applies(logits, labels), labels == 1
        both = 2 * (chosen & there).astype(jnp.float32)
        either = chosen.astype(jnp.float32) + there.astype(jnp.float32)
        return {
            "loss": sigmoid_cross_entropy(logits, labels),
            "f1": Mean(jnp.sum(both, axis=-1), jnp.sum(either, axis=-1)),
            "macro_f1": Mean(both, either),
            "exact": jnp.all(chosen == there, axis=-1).astype(jnp.float32),
            OUTPUTS: logits,
        }

    return values_of
