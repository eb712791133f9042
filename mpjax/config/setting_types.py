"""Checks the types of settings that Python code gives; on the command line and in files, the parser does."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from mpjax.config.several_words import is_a


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def wrong_types(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields a line for each setting that has a value of another type, with what it has and what is wanted.

    Args:
      settings: a dataclass of settings, whose fields may be sections.
      prefix: the name of the section with a dot, for messages.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if dataclasses.is_dataclass(value) and type(value) is hint:
            yield from wrong_types(value, f"{prefix}{name}.")
        elif wanted := _wanted(hint, value):
            yield f"--{prefix}{name} is {value!r} ({type(value).__name__}): wanted {wanted}"


def _wanted(hint: Any, value: Any) -> str:
    """Returns what a field takes, if that is not what it has."""
    if get_origin(hint) is Annotated:
        parser = hint.__metadata__[0]
        kind = "a tuple, " if parser.is_instance(()) else "a dict, " if parser.is_instance({}) else ""
        return "" if parser.is_instance(value) else f"{kind}{parser.metavar}"
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return "" if value in choices else f"one of {', '.join(map(str, choices))}"
    if hint in _NAMES:
        return "" if is_a(hint, value) else _NAMES[hint]
    return "" if isinstance(value, hint) else f"a {hint.__name__}"
