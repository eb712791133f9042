"""Defines `Pair`, a value of an emulated program in float32 and half precision, and `Place`, where it is computed."""

from typing import Any, NamedTuple

from mpjax.diagnosis.measurements import Marks


class Pair(NamedTuple):
    """A value of an emulated program, in the float32 reference and in half precision.

    Attributes:
      wide: the value in the float32 reference.
      low: the value in half precision, stored in its own dtype if it is rounded; the same array as `wide` if nothing
        has been rounded yet.
      path: the module that computed the value; None for an input or a constant.
      free: True if the value comes from a module that does not round. It is then float32, and JAX's dtype promotion
        makes the results of operations on it float32 too, except results of matrix products and casts.
      marks: whether the value is finite, and which underflow it depends on (`Marks`).
    """

    wide: Any
    low: Any
    path: str | None = None
    free: bool = False
    marks: Marks = Marks()


class Place(NamedTuple):
    """Where an equation or a jaxpr is in the program.

    Attributes:
      path: the named scopes, which are the module path; empty outside all modules.
      backward: True in a backward pass.
      callers: the calls and loops that contain it, innermost first.
    """

    path: str = ""
    backward: bool = False
    callers: tuple = ()
