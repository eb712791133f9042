"""Adds updates to parameters so that an update of zero keeps every bit.

A plain sum would not: -0.0 + 0.0 is 0.0, and a CPU flushes subnormal numbers when it adds to them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def moved_by(updates: Any, params: Any) -> Any:
    """Applies updates like `optax.apply_updates`, except that a number with an update of zero keeps its bits."""
    moved = optax.apply_updates(params, updates)
    return jax.tree.map(lambda p, new, update: jnp.where(update == 0, p, new), params, moved, updates)
