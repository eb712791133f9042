"""The values of an emulated program, in float32 and in half precision, and the places of its equations."""

from typing import Any, NamedTuple

from mpjax.diagnosis.measurements import Marks


class Pair(NamedTuple):
    """A value of the program.

    Attributes:
      wide: the value in the reference.
      low: the value in half precision, stored in its own dtype if it is rounded; the same array as `wide` if nothing
        has been rounded yet.
      path: the module that computed the value; None for an input or a constant.
      free: True if the value comes from a module that does not round. It is then float32, and JAX's dtype promotion
        makes the results of operations on it float32 too, except results of matrix products and casts.
      marks: the history of the value.
    """

    wide: Any
    low: Any
    path: str | None = None
    free: bool = False
    marks: Marks = Marks()


class Place(NamedTuple):
    """The position of a jaxpr in the program.

    Attributes:
      path: the named scopes of the jaxpr.
      backward: True if the jaxpr belongs to a backward pass.
      callers: the equations that contain the jaxpr, innermost first.
    """

    path: str = ""
    backward: bool = False
    callers: tuple = ()
