"""Language modelling: cross entropy of each next token; perplexity over a whole set."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.training.losses import cross_entropy
from mpjax.training.objectives.objective import Batch, Metrics, Objective, Sums


def language_modeling(*, label_smoothing: float = 0.0) -> Objective:
    """Batches of `tokens`, integer [B, T + 1]; the model takes the first T and gives logits [B, T, vocabulary].

    Args:
      label_smoothing: for training only.
    """

    def losses_and_hits(model, batch: Batch, smoothing: float) -> tuple[jax.Array, jax.Array]:
        tokens, following = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = model(tokens)
        losses = cross_entropy(logits, following, label_smoothing=smoothing)
        return losses, (jnp.argmax(logits, axis=-1) == following).astype(jnp.float32)

    def loss(model, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        del key  # nothing is augmented
        losses, hits = losses_and_hits(model, batch, label_smoothing)
        return jnp.mean(losses), {"accuracy": jnp.mean(hits)}

    def measure(model, batch: Batch) -> Metrics:
        losses, hits = losses_and_hits(model, batch, 0.0)
        return {"loss": jnp.mean(losses, axis=1), "accuracy": jnp.mean(hits, axis=1)}

    return Objective(loss, measure, conclude)


def conclude(sums: Sums) -> dict[str, float]:
    """`loss` and `accuracy`, means over tokens (every example has as many), and `perplexity`, exp(loss)."""
    loss, accuracy = (float(sums[name] / sums["count"]) for name in ("loss", "accuracy"))
    with np.errstate(over="ignore"):
        return {"loss": loss, "accuracy": accuracy, "perplexity": float(np.exp(np.float64(loss)))}
