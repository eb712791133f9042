"""What tuning found is found again, for what it was found for."""

import json

import pytest

from mpjax.training.tuning.timing import Timed, Timing
from mpjax.training.tuning.tune_products import Tuning, read_tuning, tuning_file, write_tuning


KEY = {"device": "NVIDIA H100 80GB", "model": "xception", "jax": "0.10.2", "batch_size": 64, "rules": {"a": "float32"}}
TIMED = (Timed("Conv", ("a/depthwise", "b/depthwise"), Timing((0.2, 0.25), (0.1, 0.125))),)
FOUND = Tuning(TIMED, {"*/depthwise": "float32"}, Timing((3.0, 3.5), (2.0, 2.5)))


def test_what_was_written_is_read_back_every_number(tmp_path):
    write_tuning(tmp_path / "tuning", KEY, FOUND)
    assert read_tuning(tmp_path / "tuning", KEY) == FOUND


def test_that_there_are_no_rules_is_kept_too(tmp_path):
    found = Tuning(TIMED, {}, None)
    write_tuning(tmp_path, KEY, found)
    assert read_tuning(tmp_path, KEY) == found


@pytest.mark.parametrize("change", [{"device": "NVIDIA A100"}, {"jax": "0.11.0"}, {"batch_size": 65}, {"rules": {}}])
def test_anything_else_is_not_found(tmp_path, change):
    write_tuning(tmp_path, KEY, FOUND)
    assert read_tuning(tmp_path, KEY | change) is None


def test_the_file_is_named_for_device_and_model_and_spells_the_key_out(tmp_path):
    file = write_tuning(tmp_path, KEY, FOUND)
    assert file == tuning_file(tmp_path, KEY)
    assert file.name.startswith("NVIDIA_H100_80GB_xception-")
    assert json.loads(file.read_text())["key"] == KEY
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "null", "[" * 100_000, '{"key": 1}', "cut", "other", "shape"])
def test_a_damaged_file_counts_as_none(tmp_path, damage):
    file = write_tuning(tmp_path, KEY, FOUND)
    text = file.read_text()
    found = json.loads(text)
    whole = {"cut": text[: len(text) // 2], "other": json.dumps(found | {"key": {}})}
    whole["shape"] = json.dumps(found | {"products": [{"type": "Conv"}]})
    file.write_text(whole.get(damage, damage))
    assert read_tuning(tmp_path, KEY) is None


@pytest.mark.parametrize("where", ["products", "step"])
@pytest.mark.parametrize(
    ("half", "full"),
    [
        ([1.0, 2.0], [1.0]),
        ([1.0], [1.0, 2.0]),
        ([1.0], [1.0]),
        ([], []),
        ([1.0, 2.0], [1.0, 0.0]),
        ([-1.0, 2.0], [1.0, 2.0]),
        ([1.0, "NaN"], [1.0, 2.0]),
        ([1.0, 2.0], ["Infinity", 2.0]),
    ],
)
def test_a_file_with_a_timing_that_no_rounds_give_counts_as_none(tmp_path, where, half, full):
    file = write_tuning(tmp_path, KEY, FOUND)
    stored = json.loads(file.read_text())
    (stored["step"] if where == "step" else stored["products"][0]).update(half=half, full=full)
    file.write_text(json.dumps(stored))
    assert read_tuning(tmp_path, KEY) is None


@pytest.mark.parametrize(
    "damage",
    [{"rules": {"a": value}} for value in ("float16", 32, None)]
    + [{"rules": ["a"]}, {"rules": {}}]
    + [{"step": step} for step in (None, {}, 0, "", [])]
    + [{"rules": {}, "step": step} for step in ({}, 0, "", [])],
)
def test_a_file_with_other_rules_or_steps_than_are_written_counts_as_none(tmp_path, damage):
    file = write_tuning(tmp_path, KEY, FOUND)
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    assert read_tuning(tmp_path, KEY) is None


@pytest.mark.parametrize("damage", [{"type": None}, {"type": 3}, {"modules": "a/b"}, {"modules": [1]}, {"modules": {}}])
def test_a_file_with_names_that_are_no_text_counts_as_none(tmp_path, damage):
    file = write_tuning(tmp_path, KEY, FOUND)
    stored = json.loads(file.read_text())
    stored["products"][0] |= damage
    file.write_text(json.dumps(stored))
    assert read_tuning(tmp_path, KEY) is None
