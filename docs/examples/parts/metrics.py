"""Metrics of the test set: one value per example, and a ratio of sums over the set, as clu and metrax have them.

python scripts/train.py --training.metrics docs/examples/parts/metrics.py:precision_of_0
"""

import jax
import jax.numpy as jnp
from flax import struct


def top2(logits, batch):
    """Returns for each example whether its label is among the two largest logits."""
    return jnp.any(jax.lax.top_k(logits, 2)[1] == batch["label"][:, None], axis=-1)


@struct.dataclass
class Precision:
    """A metric of `clu` or `metrax`: arrays that `merge` adds."""

    right: jax.Array
    claimed: jax.Array

    def merge(self, other: "Precision") -> "Precision":
        """Adds two parts of a set."""
        return Precision(self.right + other.right, self.claimed + other.claimed)

    def compute(self) -> jax.Array:
        """Returns the share of the claims that are right."""
        return self.right / jnp.maximum(self.claimed, 1)


def precision_of_0(logits, batch):
    """Returns how many of the examples that are called 0 are 0."""
    claimed = logits.argmax(-1) == 0
    return Precision(jnp.sum(claimed & (batch["label"] == 0)), jnp.sum(claimed))
