"""The types of settings: how the command line parses a value, and which values are valid.

A field of a settings dataclass defines a setting: its name, default, help and type. The type defines the valid range.

Types with their own parser are `object` to tyro. For `tuple[str, ...]`, it would import typeguard to check the default,
a quarter of the time of `--help`, and its messages would name neither the wrong word nor the valid ones.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from mpjax.config.choices import (
    AUTO,
    PlotFormat,
    Way,
    parse_model_name,
    parse_optimizer_name,
    parse_or_auto,
    parse_schedule_name,
)
from mpjax.config.durations import Duration, parse_duration
from mpjax.errors import UsageError


IN_PYTHON = "python:"
"""The prefix of `str` of a `PythonObject`."""


@dataclasses.dataclass(frozen=True, eq=False)
class PythonObject:
    """A function, class or object that was passed in Python as the value of a setting that names code.

    A run stores its text, `python:NAME`, so that a reader of the settings sees that the code is missing. Two are equal
    if they hold the same object, because its class may not define equality.
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
"""Text that may name code, such as `FILE.py:NAME`, or the code itself, passed in Python."""


class Limit(NamedTuple):
    """The valid values of a setting, in the `Annotated` metadata of its type.

    Attributes:
      wanted: the valid values in words, for messages.
      holds: whether a value of the right type is valid.
      shown: formats a value for messages.
    """

    wanted: str
    holds: Callable[[Any], bool]
    shown: Callable[[Any], str] = str


def at_least(least: int) -> Limit:
    """Builds the limit that accepts numbers of `least` or more."""
    return Limit(f"at least {least}", lambda value: value >= least)


def words(values: Sequence[Any]) -> str:
    """Joins values by spaces, as they are typed on a command line."""
    return " ".join(map(str, values))


NOT_NEGATIVE = Limit("0 or more", lambda value: 0 <= value < math.inf)
COUNTABLE = Limit("at most 2,147,483,647", lambda value: value < 2**31)  # in an int32

if TYPE_CHECKING:
    Count = CountOrZero = int
    NotNegative = BelowOne = float
else:
    Count = Annotated[int, at_least(1), COUNTABLE]
    CountOrZero = Annotated[int, NOT_NEGATIVE, COUNTABLE]
    NotNegative = Annotated[float, NOT_NEGATIVE]
    BelowOne = Annotated[float, Limit("from 0 up to, not including, 1", lambda value: 0 <= value < 1)]


def is_a(kind: Any, value: Any) -> bool:
    """True if a value has the type `kind` of a setting. A float accepts ints too; only bool accepts True and False."""
    accepted = (int, float) if kind is float else kind
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


def _one(kind: Any, metavar: str, parse: Callable[[str], Any]) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: is_a(kind, value),
        str_from_instance=lambda value: [str(value)],
    )


def _list(kind: Any, parse: Callable[[str], Any], metavar: str) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{metavar} [{metavar} ...]]",
        instance_from_str=lambda words: tuple(parse(word) for word in words),
        is_instance=lambda value: isinstance(value, tuple | list) and all(is_a(kind, item) for item in value),
        str_from_instance=lambda value: [str(item) for item in value],
    )


def list_of(words: Sequence[str]) -> Any:
    """Builds the tyro parser of a flag with any number of words, all of them in `words`, which becomes a tuple."""
    spec = _list(str, str, "{" + ",".join(words) + "}")
    return dataclasses.replace(spec, choices=tuple(words))


def _mapping(kind: type, parse: Callable[[str], Any], metavar: str) -> Any:
    def parsed(words: list[str]) -> dict[str, Any]:
        if len(words) % 2:
            raise UsageError(f"wanted pairs of a name and a value, got {len(words)} words: {' '.join(words)}")
        names = words[::2]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{twice[0]} is given twice: wanted one value for each name")
        return {name: parse(value) for name, value in zip(names, words[1::2], strict=True)}

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[STR {metavar} [STR {metavar} ...]]",
        instance_from_str=parsed,
        is_instance=lambda value: (
            isinstance(value, dict) and all(is_a(str, name) and is_a(kind, item) for name, item in value.items())
        ),
        str_from_instance=lambda value: [str(word) for pair in value.items() for word in pair],
    )


def _number(kind: type, wanted: str) -> Callable[[str], Any]:
    def parse(word: str) -> Any:
        try:
            return kind(word)
        except ValueError:
            raise UsageError(f"wanted {wanted}, got {word!r}") from None

    return parse


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def parse(word: str) -> str:
        if word not in words:
            raise UsageError(f"wanted one of {', '.join(words)}, got {word!r}")
        return word

    return parse


_whole, _real = _number(int, "whole numbers"), _number(float, "numbers")
_ways, _formats = get_args(Way), get_args(PlotFormat)

if TYPE_CHECKING:
    OrAuto = int
    Steps = Duration
    ModelName = OptimizerName = ScheduleName = Named = Code
    SeveralNamed = tuple[Code, ...]
    Texts = tuple[str, ...]
    Integers = tuple[int, ...]
    Floats = tuple[float, ...]
    TextByName = dict[str, str]
    FloatByName = dict[str, float]
    WayByName = dict[str, Way]
    PlotFormats = tuple[PlotFormat, ...]
else:
    OrAuto = Annotated[
        object,
        _one(int, "INT|auto", parse_or_auto),
        Limit("at least 1", lambda value: value == AUTO or value >= 1),
        COUNTABLE,
    ]
    Steps = Annotated[object, _one(Duration, "DURATION", parse_duration)]
    ModelName = Annotated[object, _one(Code, "MODEL", parse_model_name)]
    OptimizerName = Annotated[object, _one(Code, "OPTIMIZER", parse_optimizer_name)]
    ScheduleName = Annotated[object, _one(Code, "SCHEDULE", parse_schedule_name)]
    Named = Annotated[object, _one(Code, "STR", str)]
    SeveralNamed = Annotated[object, _list(Code, str, "STR")]
    Texts = Annotated[object, _list(str, str, "STR")]
    Integers = Annotated[object, _list(int, _whole, "INT")]
    Floats = Annotated[object, _list(float, _real, "FLOAT")]
    TextByName = Annotated[object, _mapping(str, str, "STR")]
    FloatByName = Annotated[object, _mapping(float, _real, "FLOAT")]
    WayByName = Annotated[object, _mapping(str, _one_of(_ways), "{" + ",".join(_ways) + "}")]
    PlotFormats = Annotated[
        object,
        list_of(_formats),
        Limit(
            f"one or more of {', '.join(_formats)}, each once",
            lambda value: value and len(set(value) & set(_formats)) == len(value),
            lambda value: words(value) or "empty",
        ),
    ]


def settle_auto(section: Any, *names: str) -> None:
    """Replaces the text `auto`, which Python code may set, by the number `AUTO` in the fields `names`, in place.

    `section` is a frozen dataclass; other values stay.
    """
    for name in names:
        if getattr(section, name) == "auto":
            object.__setattr__(section, name, AUTO)


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def wrong_types(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields a message for each setting, at any depth, whose value has a wrong type: the value, and the wanted type.

    `prefix` comes before the names in the messages, and is the name of a section with a dot.
    """
    for name, hint, value in _fields(settings, prefix):
        if expected := _wanted(hint, value):
            yield f"--{name} is {value!r} ({type(value).__name__}): wanted {expected}"


def out_of_range(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields a message for each setting, at any depth, whose value has the right type but is not valid.

    The message has the value and the valid values. Text is also parsed as on the command line, so that unknown names of
    models, for example, are found.
    """
    for name, hint, value in _fields(settings, prefix):
        for mark in () if _wanted(hint, value) else getattr(hint, "__metadata__", ()):
            if isinstance(mark, Limit) and not mark.holds(value):
                yield f"--{name} is {mark.shown(value)}: wanted {mark.wanted}"
                break
            if isinstance(value, str) and (parse := getattr(mark, "instance_from_str", None)):
                try:
                    parse([value])
                except UsageError as error:
                    yield f"--{name}: {error}"


def _fields(settings: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name with `prefix`, the type with metadata, and the value of each setting, also in nested sections."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if dataclasses.is_dataclass(value) and type(value) is hint:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint, value


def _wanted(hint: Any, value: Any) -> str:
    """The wanted type of a setting in words; empty if `value` has that type."""
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if parser := next((mark for mark in marks if hasattr(mark, "is_instance")), None):
        several = "a tuple, " if parser.is_instance(()) else "a dict, " if parser.is_instance({}) else ""
        expected = _KINDS[str] if parser.metavar == "STR" else parser.metavar
        return "" if parser.is_instance(value) else f"{several}{expected}"
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return "" if value in choices else f"one of {', '.join(map(str, choices))}"
    if kind in _KINDS:
        return "" if is_a(kind, value) else _KINDS[kind]
    return "" if isinstance(value, kind) else f"a {kind.__name__}"
