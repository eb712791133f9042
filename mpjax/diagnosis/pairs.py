"""The values of an emulated program: each as it is in float32 and in half precision; and where its equations stand."""

from typing import Any, NamedTuple

from mpjax.diagnosis.measurements import Marks


class Pair(NamedTuple):
    """A value of the program.

    Attributes:
      wide: as it is in the reference.
      low: as it is in half precision, rounded values in their own dtype; the same array where nothing has been rounded
        yet.
      path: the module that made it; None for an input.
      free: whether a module that does not round made it, or it comes from such a value: then it is float32, and what
        is not a product stays float32 with it, as JAX promotes.
      marks: its history.
    """

    wide: Any
    low: Any
    path: str | None = None
    free: bool = False
    marks: Marks = Marks()


class Place(NamedTuple):
    """Where in the program a jaxpr stands.

    Attributes:
      path: its named scopes.
      backward: whether it belongs to a backward pass.
      callers: the equations that hold it, innermost first.
    """

    path: str = ""
    backward: bool = False
    callers: tuple = ()
