"""Describes where a program computes a result: module, direction, source line, number of terms and of loop steps."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from jax.extend import core

from mpjax.diagnosis.pairs import Place
from mpjax.diagnosis.readings import Site
from mpjax.notebook import file_or_cell
from mpjax.precision.casting.jaxprs import opened, scan_counts
from mpjax.precision.casting.one_equation import LIBRARIES, NO_SOURCE, first_outside, source_lines, source_of


def site_of(eqn, var, place: Place) -> Site:
    """Builds the `Site` of the result `var` of an equation: module, direction, primitive, dtype, source line.

    Args:
      eqn: the equation.
      var: one of its results, whose dtype and shape are used. For a reading of a constant it is an operand instead.
      place: the module and direction of the equation, and the calls and loops that contain it.
    """
    direction = "backward" if place.backward else "forward"
    eqns = eqn, *place.callers
    where = source_of(eqns), terms_of(eqn, place.callers), steps_of(place.callers), caller_of(eqns)
    return Site(place.path, direction, eqn.primitive.name, np.dtype(var.aval.dtype), tuple(var.aval.shape), *where)


def steps_of(callers: Iterable) -> int:
    """Counts how often an equation inside nested scans runs: the product of their lengths, 1 outside of scans.

    A `while_loop` counts as one step, because its number of iterations is unknown.

    Args:
      callers: the equations that contain the equation; all but scans are ignored.
    """
    return math.prod(caller.params["length"] for caller in callers if caller.primitive.name == "scan")


def caller_of(eqns: Iterable) -> str:
    """Finds the line, `file:line`, that calls the user's function that contains an equation; empty if there is none.

    The lines of the user are those outside of `LIBRARIES`. The call is the nearest one in another function than the
    innermost line. In a notebook the file is a cell, `Cell In[3]`.

    Args:
      eqns: the equation and the equations that contain it, innermost first. The first of them that has a line of the
        user is used.
    """
    for eqn in eqns:
        lines = [line for line in source_lines(eqn) if first_outside([line], LIBRARIES) == 0]
        outer = next(
            (line for line in lines[1:] if (line.file, line.function) != (lines[0].file, lines[0].function)), None
        )
        if lines:
            return "" if outer is None else f"{file_or_cell(outer.file)}:{outer.line}"
    return ""


def is_addition(eqn, callers: Sequence) -> bool:
    """True if an equation adds one more term to a running sum.

    It is an `add_any`, with which JAX sums cotangents, or an `add` directly in the body of a scan that reads a carried
    value and whose result is carried to the next step.

    Args:
      eqn: the equation.
      callers: the equations that contain `eqn`, innermost first.
    """
    if eqn.primitive.name != "add" or not callers or callers[0].primitive.name != "scan":
        return eqn.primitive.name == "add_any"
    body, (consts, carry) = opened(callers[0].params["jaxpr"])[0], scan_counts(callers[0].params)
    carried, carried_on = body.invars[consts : consts + carry], body.outvars[:carry]
    return eqn.outvars[0] in carried_on and any(atom in carried for atom in eqn.invars if isinstance(atom, core.Var))


def terms_of(eqn, callers: Sequence) -> int:
    """The largest number of values that an equation adds into one value of its result.

    Counted are reductions, cumulative sums, window sums, scatters and running sums (`is_addition`). For any other
    equation, matrix products included, the number is 1.

    Args:
      eqn: the equation.
      callers: the equations that contain `eqn`, innermost first. An addition (`is_addition`) in scans adds one term in
        each step; other sums count the terms of one step.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "reduce_sum":
        return eqn.invars[0].aval.size // max(eqn.outvars[0].aval.size, 1)
    if name == "cumsum":
        return eqn.invars[0].aval.shape[params["axis"]]
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    if name in ("scatter-add", "scatter-sub"):
        shape, window = eqn.invars[2].aval.shape, params["dimension_numbers"].update_window_dims
        return math.prod(size for axis, size in enumerate(shape) if axis not in window)
    if is_addition(eqn, callers):
        return 1 + steps_of(callers)
    return 1


def parameter_site(path: str, direction: str, values) -> Site:
    """Builds the `Site` of a parameter, its gradient or its update.

    The operation is "parameter", without a source line.
    """
    return Site(path, direction, "parameter", np.dtype(values.dtype), tuple(values.shape), NO_SOURCE)
