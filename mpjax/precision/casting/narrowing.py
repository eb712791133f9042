"""Finds the inputs of a program that it uses only after a cast to half precision."""

from typing import Any

import numpy as np
from jax.extend import core

from mpjax.precision.casting.jaxprs import opened, scan_counts
from mpjax.precision.casting.primitives import ARRANGES, DERIVED, ENTERED, REPEATS, TAKES
from mpjax.precision.dtypes import HALF


_MOVES = (ARRANGES | TAKES) - {"split"}
"""Primitives whose only result has values of their first operand, so that a cast may precede them."""

_PROGRAMS = ENTERED - {"while"}
"""Primitives that run a program, or one of several, on their operands."""


def narrowed_inputs(jaxpr: core.Jaxpr) -> list[np.dtype | None]:
    """Finds the half-precision dtype that the program casts each input to before every use; None for other inputs.

    An earlier cast of the input, such as before a transfer to another device, does not change any result. Trace the
    gradient, not the loss alone: the backward pass uses inputs too.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, b, x):
    ...     return jnp.sum(x @ w.astype(jnp.bfloat16) + b)
    >>> w, b, x = jnp.ones((2, 2)), jnp.ones((2,)), jnp.ones((2, 2), jnp.bfloat16)
    >>> narrowed_inputs(jax.make_jaxpr(jax.grad(loss))(w, b, x).jaxpr)
    [dtype(bfloat16), None, None]
    """
    casts = ({*_uses(jaxpr, var)} for var in jaxpr.invars)
    return [next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= {*HALF} else None for dtypes in casts]


def cast_once(jaxpr: core.Jaxpr) -> list[bool]:
    """Tells for each input whether the program uses it in one place only, and there casts it to half precision.

    The gradient of the input is then one value in half precision, not a sum in the input's dtype. A use that a loop or
    a broadcast repeats, or one in a function with its own derivative rule, gives False. Trace the loss, not its
    gradient.
    """
    return [len(uses) == 1 and uses[0] in HALF for uses in (_uses(jaxpr, var, once=True) for var in jaxpr.invars)]


def _uses(jaxpr: core.Jaxpr, var: Any, *, once: bool = False) -> list[np.dtype | None]:
    """Lists the dtypes that `var` is cast to, one for each use in a jaxpr; None for a use without a cast.

    Moving or picking elements is no use: the uses of the result count. An output is a use without a cast. With `once`,
    so are uses inside functions with their own derivative rule, and uses whose gradients are added up.
    """
    casts, outputs = _followed(jaxpr, var, once)
    return casts + [None for _ in outputs]


def _followed(jaxpr: core.Jaxpr, var: Any, once: bool) -> tuple[list[np.dtype | None], list[int]]:
    """Lists the uses of `var` inside a jaxpr as `_uses` does, and the positions of the outputs that hold its values."""
    moves, calls = (_MOVES.difference(REPEATS), _PROGRAMS - DERIVED) if once else (_MOVES, _PROGRAMS)
    casts: list[np.dtype | None] = []
    outputs = [position for position, out in enumerate(jaxpr.outvars) if out is var]
    for eqn in jaxpr.eqns:
        positions = [position for position, used in enumerate(eqn.invars) if used is var]
        if not positions:
            continue
        moved: list[int] = []
        if eqn.primitive.name == "convert_element_type":
            casts.append(np.dtype(eqn.params["new_dtype"]))
        elif eqn.primitive.name in moves and positions == [0]:
            moved = [0]
        elif eqn.primitive.name in calls:
            inner, moved = _inside(eqn, positions, once)
            casts += inner
        else:
            casts.append(None)
        for position in moved:
            further, out = _followed(jaxpr, eqn.outvars[position], once)
            casts, outputs = casts + further, outputs + out
    return casts, outputs


def _inside(eqn: Any, positions: list[int], once: bool) -> tuple[list[np.dtype | None], list[int]]:
    """Follows a value into a call, a branch, or a scan of its rows or over which it is constant.

    Other uses are without a cast, and with `once` so are those of a constant, whose gradients a scan adds up.

    Args:
      eqn: the equation.
      positions: the positions of the value among the operands.
      once: as in `_uses`.

    Returns:
      The uses inside, and the positions of the results with the value.
    """
    name, params = eqn.primitive.name, eqn.params
    bodies, first = [params[key] for key in ("jaxpr", "call_jaxpr") if key in params], 0
    if name == "cond":
        bodies, first = params["branches"], 1
    if name == "scan":
        constants, carried = scan_counts(params)
        if any(position < constants + carried and (once or position >= constants) for position in positions):
            bodies = []
    bodies = [opened(body)[0] for body in bodies]
    if not bodies or positions[0] < first or any(len(body.invars) + first != len(eqn.invars) for body in bodies):
        return [None], []
    results = [_followed(body, body.invars[position - first], once) for body in bodies for position in positions]
    casts = [cast for inner, _ in results for cast in inner]
    outputs = [position for _, out in results for position in out]
    # The output of a branch or of a loop may be another value.
    return (casts + [None for _ in outputs], []) if name in ("cond", "scan") else (casts, outputs)
