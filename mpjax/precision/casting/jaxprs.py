"""Reads jaxprs of different JAX versions, including the parts that are private to JAX.

JAX 0.10 and 0.11 count the constants and carries of a scan; JAX 0.12 holds them as trees. JAX 0.12 has one class of
jaxpr, which carries the values of the constants; earlier versions have an open and a closed class. Named scopes are in
`eqn.source_info`, which has no public name.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core


# JAX 0.12 keeps the name of the closed class for older programs, without publishing it.
_Closed: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)


def is_jaxpr(value: Any) -> bool:
    """True for a jaxpr, open or closed."""
    return isinstance(value, core.Jaxpr | _Closed)


def closed(body, consts: Sequence):
    """Builds a closed jaxpr from a body (an open jaxpr) and the values of its constants, the converse of `opened`."""
    return _Closed(body, consts)


def opened(jaxpr) -> tuple[Any, Sequence]:
    """Splits a jaxpr into its body, which has `eqns`, `invars` and `outvars`, and the values of its constants.

    An open jaxpr of JAX before 0.12 has no values; the sequence is then empty.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def scan_counts(params: dict) -> tuple[int, int]:
    """Counts the constants and the carries of a scan, from its parameters.

    The inputs of a scan are the constants, the carries, and then the scanned arrays.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts.vals), len(carry.vals)


def manual_axes(params: dict) -> frozenset:
    """The mesh axes that a `shard_map` maps over."""
    return params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]


def function_of(jaxpr) -> tuple[str, str]:
    """The name and the file of the Python function that a jaxpr was traced from; "" for each that is unknown."""
    known = getattr(opened(jaxpr)[0], "debug_info", None)
    return getattr(known, "func_name", None) or "", getattr(known, "func_filename", None) or ""


def expanded(eqn):
    """Traces the function behind an equation of JAX 0.12 that stands for a whole function, as `jnp.searchsorted`.

    Returns the closed jaxpr of the function, for the traced shapes and dtypes of the equation's operands.
    """
    primitive = eqn.params["_prim"]  # a jax.experimental.hijax.VJPHiPrimitive

    def function(*operands):
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands))

    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars))


def as_function(eqn, debug_info) -> Callable:
    """Converts an equation to a function from all its operands to a list of its results.

    The operands must have the traced shapes and dtypes. Values given for literals are ignored. The derivative rules of
    the equation apply to the function.
    """
    inputs = [var for var in eqn.invars if not isinstance(var, core.Literal)]
    unique = list(dict.fromkeys(inputs))
    body = core.Jaxpr((), unique, list(eqn.outvars), [eqn], eqn.effects, debug_info=debug_info)
    evaluate = core.jaxpr_as_fun(closed(body, ()))

    def function(*values):
        by_var = {var: v for var, v in zip(eqn.invars, values, strict=True) if not isinstance(var, core.Literal)}
        return evaluate(*(by_var[var] for var in unique))

    return function


def at_indices(function: Callable, arrays: Sequence, indices: Sequence[int]) -> Callable:
    """Makes a function of the arguments at the indices `indices` alone; the other arguments stay those in `arrays`."""

    def of_some(*values):
        filled = list(arrays)
        for index, value in zip(indices, values, strict=True):
            filled[index] = value
        return function(*filled)

    return of_some


def open_shardings(shardings) -> tuple:
    """Replaces the entries that are no `Sharding` in the shardings of an inner `jit` by None: the compiler chooses."""
    return tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in shardings)


def scope_of(eqn, outer: str = "") -> str:
    """The named scopes of an equation, joined by `/` and appended to `outer`: `blocks/0/conv1`; "" without any.

    Transformations (`jvp(...)`, `transpose(...)`, `checkpoint`) are removed, so that a backward pass has the scopes of
    its forward pass.
    """
    inner = _scopes(eqn.source_info.name_stack)
    return f"{outer}/{inner}" if outer and inner else outer or inner


@functools.lru_cache(maxsize=4096)
def _text(stack) -> str:
    return str(stack)


# A scope, or a transformation around scopes: `transpose(jvp(stem/conv))`.
_PART = re.compile(r"\w+\([^/]*(?:/[^/()]+)*\)+|[^/]+")
_TRANSFORMATION = re.compile(r"\w+\((.*)\)")
_OWN_SCOPES = frozenset({"checkpoint", "rematted_computation"})


@functools.lru_cache(maxsize=4096)
def _scopes(stack) -> str:
    names: list[str] = []
    transposed: int | None = None
    differentiated: tuple[str, int] | None = None
    for part in _PART.findall(_text(stack)):
        if transposed is not None and part.startswith("jvp("):
            # The transpose of a rematerialised function repeats the path: transpose(jvp(a))/0/jvp(a)/0.
            del names[transposed:]
            transposed = None
        elif differentiated is not None and part == differentiated[0]:
            # A derivative rule that was traced where it runs repeats the path too: jvp(a)/0/jvp(a)/0.
            del names[differentiated[1] :]
        if part.startswith("transpose("):
            transposed = len(names)
        if part.startswith("jvp("):
            differentiated = part, len(names)
        scope = _inside(part)
        if scope and scope not in _OWN_SCOPES:
            names.append(scope)
    return "/".join(names)


def _inside(part: str) -> str:
    """Strips all transformations around a name: `transpose(jvp(stem))` becomes `stem`."""
    inner = _TRANSFORMATION.fullmatch(part)
    return _inside(inner[1]) if inner else part


def is_transposed(eqn) -> bool:
    """True if an equation belongs to a backward pass: its name stack has a `transpose(...)`."""
    return "transpose(" in _text(eqn.source_info.name_stack)


def is_recomputed(eqn) -> bool:
    """True if an equation of a backward pass recomputes a forward value (`jax.checkpoint`)."""
    return "rematted_computation" in _text(eqn.source_info.name_stack)
