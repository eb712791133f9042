"""NaN and infinities in strict JSON."""

import json
import math

import pytest

from mpjax import strict_json


def reject(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_what_json_lacks_is_written_as_strings():
    text = strict_json.encode({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": 2, "f": "g"})
    assert text == '{"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5, "e": 2, "f": "g"}'
    json.loads(text, parse_constant=reject)


def test_reading_gives_the_numbers_back():
    values = strict_json.decode('{"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5, "f": "g"}')
    assert math.isnan(values.pop("a"))
    assert values == {"b": math.inf, "c": -math.inf, "d": 1.5, "f": "g"}


def test_a_float_comes_back_exactly():
    assert strict_json.decode(strict_json.encode({"x": 0.1 + 0.2}))["x"] == 0.1 + 0.2


def test_something_else_than_an_object_is_refused():
    with pytest.raises(ValueError, match="not a JSON object"):
        strict_json.decode("12")
