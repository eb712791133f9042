"""Types of settings that take several words on the command line: lists, and mappings from a name to a value.

To tyro they are plain objects that these functions parse. For `tuple[str, ...]`, tyro would import typeguard to check
the default, which takes a quarter of the time of `--help`. Its messages name neither the wrong word nor the valid ones.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

import tyro

from mpjax.config.choices import PlotFormat, Way
from mpjax.errors import UsageError


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


def list_of(words: Sequence[str]) -> Any:
    """Builds the parser of a list of some of these words."""
    spec = list_of_kind(str, str, "{" + ",".join(words) + "}")
    return dataclasses.replace(spec, choices=tuple(words))


def list_of_kind(kind: Any, parse: Callable[[str], Any], metavar: str) -> Any:
    """Builds the parser of a list of values of one kind."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{metavar} [{metavar} ...]]",
        instance_from_str=lambda words: tuple(parse(word) for word in words),
        is_instance=lambda value: isinstance(value, tuple | list) and all(is_a(kind, item) for item in value),
        str_from_instance=lambda value: [str(item) for item in value],
    )


def is_a(kind: Any, value: Any) -> bool:
    """True if a setting of this kind can have the value. A float accepts integers; no number accepts True or False."""
    accepted = (int, float) if kind is float else kind
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


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


_whole, _real = _number(int, "whole numbers"), _number(float, "numbers")
_ways = get_args(Way)

if TYPE_CHECKING:
    Texts = tuple[str, ...]
    Integers = tuple[int, ...]
    Floats = tuple[float, ...]
    TextByName = dict[str, str]
    FloatByName = dict[str, float]
    WayByName = dict[str, Way]
    PlotFormats = tuple[PlotFormat, ...]
else:
    Texts = Annotated[object, list_of_kind(str, str, "STR")]
    Integers = Annotated[object, list_of_kind(int, _whole, "INT")]
    Floats = Annotated[object, list_of_kind(float, _real, "FLOAT")]
    PlotFormats = Annotated[object, list_of(get_args(PlotFormat))]
    TextByName = Annotated[object, _mapping(str, str, "STR")]
    FloatByName = Annotated[object, _mapping(float, _real, "FLOAT")]
    WayByName = Annotated[object, _mapping(str, _one_of(_ways), "{" + ",".join(_ways) + "}")]
