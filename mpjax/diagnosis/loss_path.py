"""Which variables of a step its loss depends on: operations besides them belong to the derivative."""

import functools

from jax.interpreters import partial_eval

from mpjax.precision.casting.jaxprs import opened
from mpjax.precision.casting.walk import bodies


@functools.lru_cache(maxsize=16)
def needed_for_loss(jaxpr) -> frozenset:
    """Returns the variables, also those inside calls and loops, that the first output of a jaxpr depends on."""
    body = opened(jaxpr)[0]
    used = [index == 0 for index, _ in enumerate(body.outvars)]
    reduced, _ = partial_eval.dce_jaxpr(body, used)
    return frozenset(var for each in bodies(reduced) for eqn in each.eqns for var in eqn.outvars)
