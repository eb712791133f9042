"""The objective of preferences: direct preference optimization (DPO; Rafailov et al., 2023, arXiv:2305.18290)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.adapters import adapted_layers, adapter_of
from mpjax.precision.calls import unwrap
from mpjax.training.objective import Batch, Values
from mpjax.training.softmax_cross_entropy import with_labels


if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from mpjax.extend import Objective


def preference(*, beta: float) -> Objective:
    """Creates the objective of preferences, of values [B] for each pair of conversations.

    Batches hold `tokens`, the preferred conversations, and `rejected`, integer [B, T + 1], with the marks of answers
    `answers` and `rejected_answers`, bool [B, T + 1]. A reward is `beta` times the logarithm of the ratio of two
    probabilities of the answers: by the model, and by the model without its adapters, as it was before training. The
    `loss` is -log(sigmoid(margin)), where `margin` is the reward of the preferred answers less that of the others
    (equation 7 of the paper). `accuracy` is 1 where the margin is positive. `chosen` and `rejected` are the rewards.

    Args:
      beta: the strength with which the model is held to the one before training.
    """

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        del key
        chosen, rejected = rewards(model, batch, beta=beta)
        margin = chosen - rejected
        accuracy = (margin > 0).astype(margin.dtype)
        loss = jax.nn.softplus(-margin)
        return {"loss": loss, "accuracy": accuracy, "margin": margin, "chosen": chosen, "rejected": rejected}

    return objective


def rewards(model: Any, batch: Batch, *, beta: float) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Computes the rewards of the preferred and of the rejected answers of a batch, float32 or wider."""
    tokens = jnp.concatenate([batch["tokens"], batch["rejected"]])
    answers = jnp.concatenate([batch["answers"], batch["rejected_answers"]])
    before = jax.lax.stop_gradient(log_probabilities(without_adapters(model), tokens, answers))
    chosen, rejected = jnp.split(beta * (log_probabilities(model, tokens, answers) - before), 2)
    return chosen, rejected


def log_probabilities(model: Any, tokens: Int[Array, "B T+1"], answers: Bool[Array, "B T+1"]) -> Float[Array, " B"]:
    """Sums the log-probabilities of the marked tokens of each row, in float32 or wider."""
    losses, _ = with_labels(0.0, model(tokens[:, :-1]), tokens[:, 1:])
    return -jnp.sum(jnp.where(answers[:, 1:], losses, 0), axis=1)


def without_adapters(adapted: Any) -> Any:
    """Copies a model without its adapters, in evaluation mode; the other arrays are those of the model."""
    model = nnx.merge(*nnx.split(adapted))
    for layer in adapted_layers(model).values():
        unwrap(layer, type(adapter_of(layer)))
    model.eval()  # the reference has no dropout
    return model
