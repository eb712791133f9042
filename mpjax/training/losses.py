"""Classification losses and scores per example, always in float32 or wider, whatever the logits' dtype."""

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.dtypes import FLOAT32, widest


def cross_entropy(logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0) -> jax.Array:
    """Softmax cross entropy of each example.

    Args:
      logits: floating [B, num_classes].
      labels: integer [B].
      label_smoothing: share of the target spread evenly over all classes (Szegedy et al., 2015, arXiv:1512.00567).

    Returns:
      float32 (or wider) [B].
    """
    logits = logits.astype(widest(logits.dtype, FLOAT32))
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if label_smoothing == 0:
        return nll
    uniform = -jnp.mean(jax.nn.log_softmax(logits), axis=-1)
    return (1 - label_smoothing) * nll + label_smoothing * uniform


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """float32 [B]: 1 where the largest of the logits [B, num_classes] is the label's, else 0."""
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
