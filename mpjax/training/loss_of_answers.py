"""The objective of instructions: each next token of a conversation, counted where it is one of an answer."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mpjax.models.transformer import context_of
from mpjax.training.chunked_loss import in_chunks, sums_in_chunks, token_cotangent
from mpjax.training.objective import OUTPUTS, Batch, Mean, Values
from mpjax.training.softmax_cross_entropy import with_labels


if TYPE_CHECKING:  # the protocol of the function that this module returns
    from mpjax.extend import Objective

_UNCOUNTED = -1
"""The label of tokens that do not count."""


def instructions(*, label_smoothing: float = 0.0, chunk: int = 0) -> "Objective":
    """Creates the objective of instructions: `loss` and `accuracy`, each a `Mean` over the tokens of answers.

    Batches hold `tokens`, integer [B, T + 1], and `answers`, bool [B, T + 1]. The model takes the first T tokens, and
    returns logits [B, T, vocabulary], which are the `outputs`; with a `chunk`, there are none. Padding stands behind
    all other tokens, where a causal model does not see it.

    Args:
      label_smoothing: the label smoothing of the training loss.
      chunk: the number of tokens whose logits exist at a time, as for `mpjax.training.objectives.language_modeling`.
    """

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        own = context_of(model).own
        tokens = own(batch["tokens"][:, :-1])
        labels = own(jnp.where(batch["answers"][:, 1:], batch["tokens"][:, 1:], _UNCOUNTED))
        counts = jnp.sum((labels != _UNCOUNTED).astype(jnp.float32), axis=1)
        smoothing = 0.0 if key is None else label_smoothing

        def compare(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses, hits = with_labels(smoothing, logits, jnp.maximum(labels, 0))
            counted = labels != _UNCOUNTED
            return jnp.where(counted, losses, 0), jnp.where(counted, hits, False).astype(jnp.float32)

        outputs: dict[str, Any] = {}
        features: Any = None
        balance: Any = None
        factor = 0.0 if key is None else getattr(model, "balance", 0.0)  # of the load-balancing loss of experts
        if factor:
            from mpjax.training.expert_balance import features_and_balance  # local, as few models have experts

            features, balance = features_and_balance(model, tokens, labels != _UNCOUNTED)
            outputs = {"router_loss": balance}
        elif chunk:
            features = model.features(tokens)
        if chunk:

            def of_chunk(features: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
                return compare(model.logits(features), labels)

            if key is not None:
                unit = token_cotangent(1) / jnp.maximum(jnp.sum(counts), 1)
                sums = sums_in_chunks(of_chunk, chunk, features, labels, unit=unit)
                total = jnp.sum(counts, keepdims=True)
                loss, accuracy = (Mean(x[None], total.astype(x.dtype)) for x in sums)
                if factor:
                    loss = Mean(loss.total + factor * balance.total, loss.weight)
                return {"loss": loss, "accuracy": accuracy} | outputs
            losses, hits = in_chunks(of_chunk, chunk, features, labels)
        elif factor:
            losses, hits = compare(model.logits(features), labels)
            losses = losses + factor * balance.value * (labels != _UNCOUNTED).astype(losses.dtype)
        else:
            outputs = {OUTPUTS: model(tokens)}
            losses, hits = compare(outputs[OUTPUTS], labels)
        sums = (jnp.sum(x, axis=1) for x in (losses, hits))
        loss, accuracy = (Mean(x, counts.astype(x.dtype)) for x in sums)
        return {"loss": loss, "accuracy": accuracy} | outputs

    return objective
