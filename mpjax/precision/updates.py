"""Adds updates to parameters so that an update of zero keeps every bit.

A plain sum would not: -0.0 + 0.0 is 0.0, and a CPU flushes subnormal numbers when it adds to them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def moved_by(updates: Any, params: Any) -> Any:
    """Adds updates to parameters like `optax.apply_updates`, but a number whose update is zero keeps every bit.

    The results have the dtypes of the parameters, which do not change in place.
    """
    moved = optax.apply_updates(params, updates)
    return jax.tree.map(lambda p, new, update: jnp.where(update == 0, p, new), params, moved, updates)
