"""Finds the variables of the derivative of a step: its other outputs depend on them, and its loss does not."""

import functools
from collections.abc import Sequence

from jax.extend import core
from jax.interpreters import partial_eval

from mpjax.precision.casting.jaxprs import opened
from mpjax.precision.casting.walk import bodies


@functools.lru_cache(maxsize=16)
def only_in_derivative(jaxpr) -> frozenset:
    """The variables, also inside calls and loops, that a gradient depends on but the loss (the first output) does not.

    Results of literals alone are excluded, such as the zero gradients of an evaluation.
    """
    body = opened(jaxpr)[0]
    loss, all_outputs = ([index < count for index, _ in enumerate(body.outvars)] for count in (1, len(body.outvars)))
    of_loss, computed = _computed(body, loss), _computed(body, all_outputs)
    eqns = (eqn for inner in bodies(body) for eqn in inner.eqns)
    return frozenset(
        var
        for eqn in eqns
        if of_loss.isdisjoint(eqn.outvars) and not computed.isdisjoint(eqn.outvars)
        for var in eqn.outvars
    )


def _computed(body, used: Sequence[bool]) -> frozenset:
    """The variables that the outputs with True in `used` depend on, without results of literals alone."""
    reduced, _ = partial_eval.dce_jaxpr(body, list(used))
    eqns = (eqn for inner in bodies(reduced) for eqn in inner.eqns)
    return frozenset(
        var for eqn in eqns if any(not isinstance(atom, core.Literal) for atom in eqn.invars) for var in eqn.outvars
    )
