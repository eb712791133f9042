"""Walks through a jaxpr: runs it with values of any kind, or visits every equation with its named scopes.

Autocast runs a program with arrays of other dtypes; a diagnosis runs it with pairs of values. Both define how to apply
an equation and how to represent a constant. The walk reads operands, keeps results, and drops values after their last
use. An audit, a plan and the rules only visit the equations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core

from mpjax.precision.casting.jaxprs import is_jaxpr, opened, scope_of
from mpjax.precision.casting.primitives import ENTERED


T = TypeVar("T")


def evaluated(
    jaxpr, inputs: Iterable[T], constant: Callable[[Any, Any], T], apply: Callable[..., Sequence[T]], scope: str = ""
) -> list[T]:
    """Runs a jaxpr, equation by equation, with values of any kind.

    Args:
      jaxpr: an open or closed jaxpr.
      inputs: one value for each input variable. An iterator may release each value once it is taken.
      constant: a function that makes a value from `(variable or literal, array)`.
      apply: `(equation, scope, operands, debug_info) -> results`. It may empty `operands`: after a value's last use
        that list holds the only reference, so emptying it frees the value.
      scope: the named scopes around the jaxpr.

    Returns:
      The values of the output variables.
    """
    body, consts = opened(jaxpr)
    values: dict[Any, T] = {var: constant(var, const) for var, const in zip(body.constvars, consts, strict=True)}
    values.update(zip(body.invars, inputs, strict=True))
    last = _last_uses(body)

    def read(atom) -> T:
        return constant(atom, atom.val) if isinstance(atom, core.Literal) else values[atom]

    def forget(index: int | None) -> None:
        for var in last.get(index, ()):
            values.pop(var, None)

    forget(None)
    for index, eqn in enumerate(body.eqns):
        operands = [read(atom) for atom in eqn.invars]
        forget(index)  # before the equation runs, so that `apply` can free its operands
        values.update(zip(eqn.outvars, apply(eqn, scope_of(eqn, scope), operands, body.debug_info), strict=True))
        forget(index)  # results without a use
    return [read(atom) for atom in body.outvars]


def _last_uses(body) -> dict[int | None, list]:
    """Lists the variables that are last used by each equation, by its index; under None, inputs that none uses.

    Outputs of the jaxpr are left out.
    """
    kept = {var for var in body.outvars if not isinstance(var, core.Literal)}
    last: dict[Any, int | None] = dict.fromkeys((*body.constvars, *body.invars))
    for index, eqn in enumerate(body.eqns):
        for var in (*eqn.invars, *eqn.outvars):
            if not isinstance(var, core.Literal):
                last[var] = index
    after: dict[int | None, list] = {}
    for var, index in last.items():
        if var not in kept:
            after.setdefault(index, []).append(var)
    return after


class Body(NamedTuple):
    """An open jaxpr and its place in the program.

    Attributes:
      scope: the named scopes around the jaxpr.
      eqns: its equations.
      outvars: its output variables and literals.
      callers: the equations that contain it, innermost first.
    """

    scope: str
    eqns: Sequence
    outvars: Sequence
    callers: tuple = ()


def bodies(jaxpr, scope: str = "", callers: tuple = ()) -> Iterator[Body]:
    """Yields a jaxpr and, recursively and in program order, the jaxprs inside its control flow and calls.

    `scope` and `callers` are the named scopes and the equations around the jaxpr.
    """
    body = opened(jaxpr)[0]
    yield Body(scope, body.eqns, body.outvars, callers)
    for eqn in body.eqns:
        for held in held_by(eqn):
            yield from bodies(held, scope_of(eqn, scope), (eqn, *callers))


def equations(jaxpr) -> Iterator[tuple[str, Any]]:
    """Yields `(named scopes, equation)` for each equation of a jaxpr and of the jaxprs inside it.

    Control flow and calls themselves are left out: the equations inside them stand for them.
    """
    for body in bodies(jaxpr):
        for eqn in body.eqns:
            if not holds_bodies(eqn):
                yield scope_of(eqn, body.scope), eqn


def holds_bodies(eqn) -> bool:
    """True for control flow, calls and `shard_map`, which consist of the jaxprs inside them; False for kernels."""
    return eqn.primitive.name in ENTERED


def held_by(eqn) -> list:
    """The jaxprs inside control flow or a call; an empty list for other equations."""
    if not holds_bodies(eqn):
        return []
    return [node for node in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr) if is_jaxpr(node)]


def called(eqn):
    """The jaxpr of a call; None if the equation has no parameter `jaxpr` or `call_jaxpr`."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
