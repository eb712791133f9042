"""NaN and infinities in strict JSON."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

import mpjax
from mpjax import strict_json


def reject(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_what_json_lacks_is_written_as_strings():
    text = strict_json.encode({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": 2, "f": "g"})
    assert text == '{"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5, "e": 2, "f": "g"}'
    json.loads(text, parse_constant=reject)


def test_what_default_returns_is_written_in_the_same_way():
    text = strict_json.encode({"a": {1}, "b": [{2}]}, default=lambda numbers: (*numbers, math.nan))
    assert text == '{"a": [1, "NaN"], "b": [[2, "NaN"]]}'


def test_reading_gives_the_numbers_back():
    values = strict_json.decode('{"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5, "f": "g"}')
    assert math.isnan(values.pop("a"))
    assert values == {"b": math.inf, "c": -math.inf, "d": 1.5, "f": "g"}


def test_what_turns_or_breaks_a_line_is_escaped_and_comes_back():
    values = {"path": "a\x9b\u202e\u2028\u200fb"}
    assert strict_json.encode(values) == r'{"path": "a\u009b\u202e\u2028\u200fb"}'
    assert strict_json.decode(strict_json.encode(values)) == values


def test_a_name_that_is_not_utf8_can_be_sent_and_comes_back():
    name = os.fsdecode(b"caf\xe9.py")
    text = strict_json.encode({"file": name})
    assert text.encode() == b'{"file": "caf\\udce9.py"}'
    assert strict_json.decode(text) == {"file": name}


def test_a_float_comes_back_exactly():
    assert strict_json.decode(strict_json.encode({"x": 0.1 + 0.2}))["x"] == 0.1 + 0.2


def test_something_else_than_an_object_is_refused():
    with pytest.raises(ValueError, match="not a JSON object"):
        strict_json.decode("12")


def test_a_file_is_utf8_in_every_locale(tmp_path):
    code = (
        f"from mpjax import strict_json; strict_json.export({{'path': 'gr\\xf6\\xdfe'}}, {str(tmp_path / 'a.json')!r})"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-X", "utf8=0", "-c", code], env=environment, check=True)
    assert (tmp_path / "a.json").read_bytes() == b'{\n  "path": "gr\xc3\xb6\xc3\x9fe"\n}\n'


def test_it_is_the_only_writer_of_json():
    """But for digests, names in quotes in a line to copy, a score that Orbax reads, and a filter of chat templates."""
    others = {
        "strict_json.py": 1,
        "loop/checksums.py": 1,
        "loop/checkpoint.py": 1,
        "data/text/chat_template.py": 1,
    }
    others |= {"diagnosis/facts.py": 1, "models/pretrained/files.py": 2, "data/sources/huggingface_files.py": 1}
    package = pathlib.Path(mpjax.__file__).parent
    found = {str(file.relative_to(package)): len(re.findall(r"json\.dumps?\(", file.read_text()))
             for file in package.rglob("*.py")}  # fmt: skip
    assert {name: count for name, count in found.items() if count} == others
