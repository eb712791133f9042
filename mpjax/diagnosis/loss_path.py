"""Finds the variables that belong to the backward pass of a step: the gradients depend on them, the loss does not."""

import functools
from collections.abc import Sequence

from jax.extend import core
from jax.interpreters import partial_eval

from mpjax.precision.casting.jaxprs import opened
from mpjax.precision.casting.walk import bodies


@functools.lru_cache(maxsize=16)
def only_in_derivative(jaxpr) -> frozenset:
    """The variables of a jaxpr that its other outputs (gradients) depend on, but its first output (the loss) does not.

    Variables inside calls and loops are included. Results of equations with only literals as operands are excluded,
    such as the zero gradients of an evaluation. The answer is cached for the last 16 jaxprs.
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
    """The variables that the outputs marked True in `used` depend on, without results of literals alone."""
    reduced, _ = partial_eval.dce_jaxpr(body, list(used))
    eqns = (eqn for inner in bodies(reduced) for eqn in inner.eqns)
    return frozenset(
        var for eqn in eqns if any(not isinstance(atom, core.Literal) for atom in eqn.invars) for var in eqn.outvars
    )
