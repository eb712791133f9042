"""Runs functions with a custom derivative rule for autocast: the primal and the rule each run with casts.

Differentiating the equation at its traced dtypes gives the rule. This needs no private form of the rule.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.casting.jaxprs import as_function, at_indices
from mpjax.precision.casting.values import (
    UNKNOWN,
    Origin,
    Value,
    arrays_of,
    avals_of,
    cast_like,
    computed_from,
    values_of,
)


def custom_jvp(run, eqn, inputs, debug_info) -> list:
    """Runs an equation of a `jax.custom_jvp` function with casts in the primal and in the user's rule.

    Differentiation with respect to an array that the function closes over raises UsageError.
    """
    original = as_function(eqn, debug_info)
    facts = [value.fact for value in inputs]
    avals = avals_of(eqn.invars)
    differentiable = _differentiable(eqn)

    def primal(*arrays):
        return arrays_of(run(eqn.params["call_jaxpr"], values_of(arrays, facts)))

    function = jax.custom_jvp(primal)

    @function.defjvp
    def rule(primals, tangents):
        def jvp_at(primals, tangents):
            of_floats = at_indices(original, primals, differentiable)
            return jax.jvp(of_floats, [primals[i] for i in differentiable], tangents)

        moving = [tangents[i] for i in differentiable]
        traced = jax.make_jaxpr(jvp_at)(_like(avals), _like(avals[i] for i in differentiable))
        outputs = arrays_of(run(traced, values_of([*primals, *moving], facts + [UNKNOWN] * len(moving))))
        shapes = jax.eval_shape(primal, *primals)
        values, slopes = outputs[: len(shapes)], outputs[len(shapes) :]
        return cast_like(values, shapes), cast_like(slopes, shapes)

    return computed_from(inputs, function(*_constants_held(eqn, inputs)))


def custom_vjp(run, eqn, inputs, debug_info) -> list:
    """Runs an equation of a `jax.custom_vjp` function with casts in the primal and in both of the user's rules.

    Differentiation with respect to an array that the function closes over raises UsageError.
    """
    original = as_function(eqn, debug_info)
    facts = [value.fact for value in inputs]
    in_avals, out_avals = avals_of(eqn.invars), avals_of(eqn.outvars)
    differentiable = _differentiable(eqn)
    backward: dict[str, Any] = {}

    def forward_at(*arrays):
        of_floats = at_indices(original, arrays, differentiable)
        outputs, pull = jax.vjp(of_floats, *(arrays[i] for i in differentiable))
        residuals, backward["tree"] = jax.tree.flatten(pull)
        return list(outputs), residuals

    def primal(*arrays):
        return arrays_of(run(eqn.params["call_jaxpr"], values_of(arrays, facts)))

    def forward(*arrays):
        traced, (_, residual_shapes) = jax.make_jaxpr(forward_at, return_shape=True)(*_like(in_avals))
        backward["residuals"] = residual_shapes
        results = run(traced, values_of(arrays, facts))
        backward["facts"] = [Value(None, origin=value.origin) for value in results[len(out_avals) :]]
        outputs = arrays_of(results)
        values, residuals = outputs[: len(out_avals)], outputs[len(out_avals) :]
        return cast_like(values, jax.eval_shape(primal, *arrays)), (
            residuals,
            [jnp.zeros((0,), arrays[i].dtype) for i in differentiable],
        )

    def pull_back(kept, cotangents):
        residuals, like = kept

        def pull_at(residuals, cotangents):
            return jax.tree.unflatten(backward["tree"], residuals)(cotangents)

        shapes = backward["residuals"], _like(out_avals)
        traced = jax.make_jaxpr(pull_at)(*shapes)
        known = [*backward["facts"], *[Value(None, origin=Origin.BATCH)] * len(cotangents)]
        grads = iter(arrays_of(run(traced, values_of([*residuals, *cotangents], known))))
        dtypes = (kept.dtype for kept in like)
        return tuple(
            next(grads).astype(next(dtypes)) if i in differentiable else _no_gradient(aval)
            for i, aval in enumerate(in_avals)
        )

    function = jax.custom_vjp(primal)
    function.defvjp(forward, pull_back)
    return computed_from(inputs, function(*_constants_held(eqn, inputs)))


def _differentiable(eqn) -> list[int]:
    """The indices of the inputs that the user's rule differentiates: floating or complex, and not closed over."""
    avals, closed_over = avals_of(eqn.invars), eqn.params.get("num_consts", 0)
    return [i for i, aval in enumerate(avals) if i >= closed_over and jnp.issubdtype(aval.dtype, jnp.inexact)]


def _constants_held(eqn, inputs) -> list[jax.Array]:
    closed_over = eqn.params.get("num_consts", 0)
    return [_held(x) if i < closed_over else x for i, x in enumerate(arrays_of(inputs))]


@jax.custom_jvp
def _held(x):
    return x


@_held.defjvp
def _no_rule(primals, tangents):
    raise UsageError(
        "a custom_jvp or custom_vjp function is differentiated with respect to an array it closed over, for which it "
        "has no rule: make that array an argument"
    )


def _like(avals) -> list:
    """Copies abstract values without weak types, as arguments for tracing.

    Unlike new abstract arrays, avals contain the mesh axes over which the values vary.
    """
    return [aval.update(weak_type=False) for aval in avals]


def _no_gradient(aval):
    return np.zeros(aval.shape, jax.dtypes.float0)


HANDLERS = {"custom_jvp_call": custom_jvp, "custom_vjp_call": custom_vjp}
