"""Strict JSON that represents NaN and the infinities as strings."""

import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from mpjax.errors import CONTROL


_ESCAPED = re.compile(f"{CONTROL.pattern}|[\ud800-\udfff]")  # half characters, as in names of files that are not UTF-8
_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any, *, indent: int | None = None, default: Callable | None = None) -> str:
    """Encodes `value` as JSON without a trailing newline, on one line unless `indent` is given.

    NaN and the infinities become strings. Control characters are escaped and surrogates, which stand for bytes that are
    not UTF-8 in the names of files. Other characters are not.

    >>> encode({"loss": float("nan"), "step": 3})
    '{"loss": "NaN", "step": 3}'

    Args:
      value: a number, string, bool or None, or nested mappings, lists and tuples of them.
      indent: spaces per level.
      default: converts a value of another type to one of these; None: such a value is a TypeError.
    """
    converted = default and (lambda value: spelled(default(value)))
    text = json.dumps(spelled(value), indent=indent, default=converted, allow_nan=False, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def export(values: Mapping[str, Any], file: str | pathlib.Path | None, *, default: Callable | None = None) -> str:
    """Encodes `values` as JSON with an indent of 2, and returns the text; if `file` is not None, also writes it there.

    The file is in UTF-8 whatever the locale, is overwritten if it exists, and ends in a newline, unlike the text.
    `default` is that of `encode`.
    """
    text = encode(values, indent=2, default=default)
    if file is not None:
        pathlib.Path(file).write_text(text + "\n", encoding="utf-8")
    return text


def decode(text: str) -> dict[str, Any]:
    """Decodes a JSON object that `encode` wrote. Any value "NaN", "Infinity" or "-Infinity" in it becomes a float.

    >>> decode('{"loss": "NaN", "step": 3}')
    {'loss': nan, 'step': 3}

    Raises:
      ValueError: `text` is not a JSON object.
      RecursionError: it is nested too deep.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"not a JSON object: {text[:40]}")
    return {name: _read(value) for name, value in values.items()}


def _read(value):
    if isinstance(value, dict):
        return {name: _read(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_read(item) for item in value]
    return _SPELLED.get(value, value) if isinstance(value, str) else value


def spelled(value) -> Any:
    """Prepares a value for `json.dumps`: NaN and infinities become strings, mappings dicts, and tuples lists.

    The strings are "NaN", "Infinity" and "-Infinity". Nested values are converted too. Values of other types stay as
    they are.
    """
    if isinstance(value, Mapping):
        return {name: spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [spelled(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
