"""How an update is added to parameters: one of zero keeps every bit.

A sum would not: -0.0 + 0.0 is 0.0, and a CPU flushes subnormal numbers that it adds to.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def moved_by(updates: Any, params: Any) -> Any:
    """Returns `optax.apply_updates(params, updates)`, except that a number with an update of zero stays as it is."""
    moved = optax.apply_updates(params, updates)
    return jax.tree.map(lambda p, new, update: jnp.where(update == 0, p, new), params, moved, updates)
