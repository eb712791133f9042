"""Computes the first steps of an update rule on small arrays, to see whether they are finite."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.skip_step import optax_promotion


_STEPS = 3  # what a first step leaves behind may take another one to show


def begins_finite(rule: optax.GradientTransformation, *tried: Mapping[str, Any]) -> bool:
    """Returns whether parameters are finite after the first steps of a rule.

    Args:
      rule: the update rule, with its schedule.
      tried: shapes of parameters by name; axes are cut to 2. The first on which the rule can be computed decides: a
        rule of the user's may know the parameters of a run by their names. If there are none, the answer is True.
    """
    tx = optax.with_extra_args_support(rule)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda p: p / 4, params)
        updates, state = tx.update(grads, state, params, value=jnp.float32(1))
        return optax.apply_updates(params, updates), state

    for shapes in tried:
        params = {name: jnp.ones([min(size, 2) for size in x.shape], x.dtype) for name, x in shapes.items()}
        try:
            with optax_promotion():
                state = tx.init(params)
                for _ in range(_STEPS):
                    params, state = step(params, state)
        except Exception:  # any error of the rule: it is not for these parameters
            continue
        return all(bool(jnp.all(jnp.isfinite(p))) for p in params.values())
    return True
