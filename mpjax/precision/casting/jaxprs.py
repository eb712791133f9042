"""What JAX's versions disagree on about jaxprs; the only file that knows parameters JAX keeps private.

A scan counts its constants and carries in 0.10 and 0.11, and holds them as trees in 0.12; 0.12 has one class of jaxpr
where there were an open one and a closed one, which carries the values of the constants.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core


def opened(jaxpr) -> tuple[Any, Sequence]:
    """A jaxpr's body and the values of its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def scan_counts(params: dict) -> tuple[int, int]:
    """How many constants and carries come first among a scan's inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts.vals), len(carry.vals)


def manual_axes(params: dict) -> frozenset:
    """The mesh axes that a `shard_map` maps over."""
    return params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]


def as_function(eqn, debug_info) -> Callable:
    """One equation as a function of all its inputs to a list of outputs; its derivative rules stay in force."""
    inputs = [var for var in eqn.invars if not isinstance(var, core.Literal)]
    unique = list(dict.fromkeys(inputs))
    body = core.Jaxpr((), unique, list(eqn.outvars), [eqn], eqn.effects, debug_info=debug_info)
    run = core.jaxpr_as_fun(core.ClosedJaxpr(body, ()))

    def function(*values):
        by_var = {var: v for var, v in zip(eqn.invars, values, strict=True) if not isinstance(var, core.Literal)}
        return run(*(by_var[var] for var in unique))

    return function


def open_shardings(shardings) -> tuple:
    """The shardings of an inner `jit`, None where it left them to the compiler."""
    return tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in shardings)
