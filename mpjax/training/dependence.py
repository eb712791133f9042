"""Finds out which arguments of a function its results depend on, by tracing it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def used_arguments(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Returns, for each leaf of the arguments, whether a result of the function may depend on its value.

    An operation depends on all of its operands, so that a leaf that cannot change a result may be taken for one that
    can, but not the other way round.

    Args:
      function: a function that JAX can trace.
      arguments: arrays, or their shapes.

    >>> import jax.numpy as jnp
    >>> used_arguments(lambda x, y: jnp.sin(x) + y.shape[0], jnp.ones(2), jnp.ones(2))
    (True, False)
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    needed = {var for var in jaxpr.outvars if isinstance(var, core.Var)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(var for var in equation.invars if isinstance(var, core.Var))
    return jax.tree.unflatten(jax.tree.structure(arguments), [var in needed for var in jaxpr.invars])
