"""Strict JSON for numbers that strict JSON does not have: NaN and the infinities are written as strings."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(values: Mapping[str, Any], *, indent: int | None = None, default: Callable | None = None) -> str:
    """The JSON object of `values`, on one line unless indented, without a newline at its end.

    Args:
      values: of numbers, texts, lists and mappings.
      indent: spaces for each level.
      default: makes one of these of anything else.
    """
    return json.dumps(spelled(values), indent=indent, default=default, allow_nan=False, ensure_ascii=False)


def decode(text: str) -> dict[str, Any]:
    """The values of a JSON object that `encode` wrote.

    Raises:
      ValueError: not a JSON object.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"not a JSON object: {text[:40]}")
    return {name: _read(value) for name, value in values.items()}


def _read(value):
    if isinstance(value, dict):
        return {name: _read(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_read(each) for each in value]
    return _SPELLED.get(value, value) if isinstance(value, str) else value


def spelled(value) -> Any:
    """Returns `value` with NaN and the infinities in it as strings, mappings as dicts and tuples as lists."""
    if isinstance(value, Mapping):
        return {name: spelled(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [spelled(each) for each in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
