"""One equation of a jaxpr: applied to arrays of other dtypes, and the source lines it comes from."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax


# Not bound with their parameters, which hold the program of the combination in the dtype it was traced with.
_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def bind(primitive, arrays: Sequence, params: dict) -> Sequence[jax.Array]:
    """The results of a primitive for these arrays and parameters."""
    if primitive.name in _SCATTERS:
        operand, indices, updates = arrays
        kept = {name: params[name] for name in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return [_SCATTERS[primitive.name](operand, indices, updates, **kept)]
    outputs = primitive.bind(*arrays, **params)
    return outputs if primitive.multiple_results else [outputs]


try:
    from jax._src.source_info_util import current_name_stack, user_context
except ImportError:  # a JAX to come: scopes are kept, lines are those of this package
    current_name_stack = user_context = None


LIBRARIES = ("/jax/", "/flax/", "/haiku/", "/equinox/", "/optax/", "/mpjax/precision/", "/mpjax/diagnosis/")


class Place(NamedTuple):
    """A line of code.

    Attributes:
      file: its path.
      line: its number, from 1.
      function: the function it is in.
    """

    file: str
    line: int
    function: str


def places(eqn) -> list[Place]:
    """The lines of code that an equation comes from, innermost first; none if JAX kept no traceback."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    return [Place(frame.file_name, frame.line_num, frame.function_name.rsplit(".")[-1]) for frame in frames]


def source_of(eqns: Iterable) -> str:
    """The user's line behind an equation and those that hold it, innermost first; or else a library's nearest to it."""
    eqns = tuple(eqns)
    for libraries in (LIBRARIES, ("/jax/", "/mpjax/precision/", "/mpjax/diagnosis/")):
        for lines in map(places, eqns):
            outside = first_outside(lines, libraries)
            if outside < len(lines):
                return f"{lines[outside].file}:{lines[outside].line}"
    return "(no source line)"


def standing_at(eqn) -> AbstractContextManager:
    """While it is open, what is traced has the named scopes and the lines of an equation."""
    if user_context is None or current_name_stack is None:
        return jax.named_scope(str(eqn.source_info.name_stack))
    # On top of the scopes that are open already, as in jax.core.eval_jaxpr.
    return user_context(eqn.source_info.traceback, name_stack=current_name_stack() + eqn.source_info.name_stack)


def first_outside(lines: list[Place], folders: tuple[str, ...]) -> int:
    """How many of the innermost lines are in one of `folders`."""
    inside = (any(folder in line.file for folder in folders) for line in lines)
    return next((index for index, within in enumerate(inside) if not within), len(lines))
