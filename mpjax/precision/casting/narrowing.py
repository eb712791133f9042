"""Finds the inputs of a program that it only uses after casting them to half precision."""

from typing import Any

import numpy as np
from jax.extend import core

from mpjax.precision.dtypes import HALF


_MOVES = frozenset({"reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "copy_p", "slice", "rev"})
"""Primitives that keep every value, so that a cast may as well come before them."""


def narrowed_inputs(jaxpr: core.Jaxpr) -> list[np.dtype | None]:
    """Returns, for each input, the half precision that the program casts it to before every use, or None.

    Casting such an input earlier, as before it is sent to another device, does not change any result. Trace the
    gradient, not the loss alone: the backward pass uses inputs too.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, b, x):
    ...     return jnp.sum(x @ w.astype(jnp.bfloat16) + b)
    >>> w, b, x = jnp.ones((2, 2)), jnp.ones((2,)), jnp.ones((2, 2), jnp.bfloat16)
    >>> narrowed_inputs(jax.make_jaxpr(jax.grad(loss))(w, b, x).jaxpr)
    [dtype(bfloat16), None, None]
    """
    found = (_uses(jaxpr, var) for var in jaxpr.invars)
    return [next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= set(HALF) else None for dtypes in found]


def _uses(jaxpr: core.Jaxpr, var: Any) -> set[np.dtype | None]:
    """Returns the dtypes that `var` is cast to, and None if it is also used as it is."""
    found: set[np.dtype | None] = {None} if any(out is var for out in jaxpr.outvars) else set()
    for eqn in jaxpr.eqns:
        places = [index for index, used in enumerate(eqn.invars) if used is var]
        if not places:
            continue
        if eqn.primitive.name == "convert_element_type":
            found.add(np.dtype(eqn.params["new_dtype"]))
        elif eqn.primitive.name in _MOVES:
            found |= _uses(jaxpr, eqn.outvars[0])
        else:
            found |= _inner_uses(eqn, places)
    return found


def _inner_uses(eqn: Any, places: list[int]) -> set[np.dtype | None]:
    """Returns the uses inside the jaxprs of a call, a branch, or a loop that does not change the value."""
    name = eqn.primitive.name
    if name == "cond":
        bodies, first = eqn.params["branches"], 1
    elif name == "scan":
        bodies, first = [eqn.params["jaxpr"]], 0
        constants = eqn.params["num_consts"]
        if any(place >= constants for place in places):
            return {None}
    else:
        bodies, first = [eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params], 0
        if name == "while" or not bodies:
            return {None}
    found: set[np.dtype | None] = set()
    for body in bodies:
        inner = getattr(body, "jaxpr", body)
        if len(inner.invars) + first != len(eqn.invars) or any(place < first for place in places):
            return {None}
        for place in places:
            found |= _uses(inner, inner.invars[place - first])
    return found
