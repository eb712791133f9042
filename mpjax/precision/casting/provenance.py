"""The lines of code that an equation of a jaxpr comes from.

There is no public name for them: they are in `eqn.source_info.traceback`, which JAX keeps for its error messages.
"""

from collections.abc import Iterable
from typing import NamedTuple


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


def first_outside(lines: list[Place], folders: tuple[str, ...]) -> int:
    """How many of the innermost lines are in one of `folders`."""
    inside = (any(folder in line.file for folder in folders) for line in lines)
    return next((index for index, within in enumerate(inside) if not within), len(lines))
