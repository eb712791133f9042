"""Applies an equation of a jaxpr to arrays of other dtypes, and finds its source lines."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
from jax.extend import source_info_util

from mpjax.notebook import file_or_cell


# Called as functions, because their parameters include the combining function as a jaxpr of the traced dtype.
_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def bind(primitive, arrays: Sequence, params: dict) -> Sequence[jax.Array]:
    """Applies a primitive with an equation's `params` to arrays, whose dtypes may differ from the traced ones.

    Returns the sequence of its outputs, also for a single one. A scatter combines by the function of its name, not by
    the jaxpr in `params`.
    """
    if primitive.name in _SCATTERS:
        operand, indices, updates = arrays
        kept = {name: params[name] for name in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return [_SCATTERS[primitive.name](operand, indices, updates, **kept)]
    outputs = primitive.bind(*arrays, **params)
    return outputs if primitive.multiple_results else [outputs]


LIBRARIES = (
    *("/jax/", "/flax/", "/haiku/", "/equinox/", "/optax/"),
    *("/mpjax/precision/", "/mpjax/diagnosis/", "/mpjax/training/sequence.py"),
)


NO_SOURCE = "(no source line)"
"""The source of a parameter, and of an equation without source lines."""


class SourceLine(NamedTuple):
    """A line of source code.

    Attributes:
      file: the path of the file.
      line: the line number, from 1.
      function: the name of the enclosing function.
    """

    file: str
    line: int
    function: str


def source_lines(eqn) -> list[SourceLine]:
    """Lists the source lines of the traceback of an equation, innermost first; empty if JAX kept no traceback."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    return [SourceLine(frame.file_name, frame.line_num, frame.function_name.rsplit(".")[-1]) for frame in frames]


def source_of(eqns: Iterable) -> str:
    """Finds the user's line (`file:line`) of an equation: the innermost that is in none of `LIBRARIES`.

    Without one, it is the innermost line of Flax, Haiku, Equinox or Optax; without that too, `NO_SOURCE`. In a notebook
    it is the line of a cell, `Cell In[3]:7`.

    Args:
      eqns: the equation and the equations that contain it, innermost first.
    """
    eqns = tuple(eqns)
    for libraries in (LIBRARIES, ("/jax/", "/mpjax/precision/", "/mpjax/diagnosis/")):
        for lines in map(source_lines, eqns):
            outside = first_outside(lines, libraries)
            if outside < len(lines):
                return f"{file_or_cell(lines[outside].file)}:{lines[outside].line}"
    return NO_SOURCE


def standing_at(eqn) -> AbstractContextManager:
    """Context: operations traced inside the `with` block get the named scopes and source lines of an equation."""
    # Adds to the scopes that are already open, like jax.core.eval_jaxpr.
    scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes)


def first_outside(lines: list[SourceLine], folders: tuple[str, ...]) -> int:
    """The index of the first of `lines` whose file path contains none of the texts `folders`; `len(lines)` if none."""
    inside = (any(folder in line.file for folder in folders) for line in lines)
    return next((index for index, within in enumerate(inside) if not within), len(lines))
