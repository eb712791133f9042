"""Types of settings with a parser for their text on the command line."""

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from mpjax.config.choices import AUTO, parse_model_name, parse_optimizer_name, parse_or_auto, parse_schedule_name
from mpjax.config.durations import Duration, as_duration, parse_duration
from mpjax.config.several_words import is_a, list_of_kind


IN_PYTHON = "python:"
"""The beginning of the text of a setting that holds an object."""


@dataclasses.dataclass(frozen=True, eq=False)
class PythonObject:
    """A function, class or object that was passed in Python as the value of a setting that names code.

    Its text is `python:NAME`. A run stores that, and a reader of the stored settings sees that the code is not there.
    Two are equal if they hold the same object, whether or not objects of its class can be compared.
    """

    value: Any

    def __str__(self) -> str:
        return IN_PYTHON + getattr(self.value, "__qualname__", type(self.value).__qualname__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonObject) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple:
        if isinstance(self.value, types.MethodType):  # a new object each time that it is read
            return id(self.value.__self__), id(self.value.__func__)
        return (id(self.value),)


Code = str | PythonObject
"""Text that may name code, or the code itself."""


def _parsed(kind: Any, metavar: str, parse: Callable[[str], Any]) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: is_a(kind, value),
        str_from_instance=lambda value: [str(value)],
    )


OrAuto = Annotated[int, _parsed(int, "INT|auto", parse_or_auto)]
"""A number of at least 1 on the command line, or `auto`, which is `AUTO`."""

Steps = Annotated[Duration, _parsed(Duration, "DURATION", parse_duration)]
"""A `Duration` on the command line: `500`, `1e6 examples`, `30 epochs`."""

ModelName = Annotated[Code, _parsed(Code, "MODEL", parse_model_name)]
"""The name of a model on the command line."""

OptimizerName = Annotated[Code, _parsed(Code, "OPTIMIZER", parse_optimizer_name)]
"""The name of an update rule on the command line."""

ScheduleName = Annotated[Code, _parsed(Code, "SCHEDULE", parse_schedule_name)]
"""The name of a learning-rate schedule on the command line."""

Named = Annotated[Code, _parsed(Code, "STR", str)]
"""The name of code, or of data, on the command line."""

if TYPE_CHECKING:
    SeveralNamed = tuple[Code, ...]
else:
    SeveralNamed = Annotated[object, list_of_kind(Code, str, "STR")]


def settle_auto(section: Any, *names: str) -> None:
    """Converts the text `auto`, which Python code may set, to `AUTO`."""
    for name in names:
        if getattr(section, name) == "auto":
            object.__setattr__(section, name, AUTO)


def settle_durations(section: Any, *names: str) -> None:
    """Converts fields that Python code sets to a number of steps or to text to `Duration`."""
    for name in names:
        object.__setattr__(section, name, as_duration(getattr(section, name)))


def epochs(amount: float) -> Duration:
    """Creates a `Duration` in epochs."""
    return Duration(amount, "epochs")
