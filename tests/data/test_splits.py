import re

import pytest

from mpjax.data import base_names, parts_of
from mpjax.errors import UsageError


SIZES = {"train": 10, "test": 4}


@pytest.mark.parametrize(
    ("expression", "parts"),
    [
        ("train", [("train", 0, 10)]),
        ("train[:90%]", [("train", 0, 9)]),
        ("train[90%:]", [("train", 9, 10)]),
        ("train[2:5]", [("train", 2, 5)]),
        ("train[-3:]", [("train", 7, 10)]),
        ("train[8:]+test[:1]", [("train", 8, 10), ("test", 0, 1)]),
        ("all", [("train", 0, 10), ("test", 0, 4)]),
    ],
)
def test_expressions(expression, parts):
    assert parts_of(expression, SIZES, "set") == parts


@pytest.mark.parametrize("expression", ["validation", "train[", "train[20:]", "all[:2]", "train[:5%"])
def test_what_cannot_be_read_says_what_there_is_and_what_to_write(expression):
    with pytest.raises(UsageError) as raised:
        parts_of(expression, SIZES, "set")
    assert f"split '{expression}' of 'set': " in str(raised.value)
    assert "it has train (10 examples), test (4 examples); write --data.train_split" in str(raised.value)
    assert "'train[:90%]' and 'train[90%:]'" in str(raised.value)


@pytest.mark.parametrize("name", ["validation", "val"])
def test_a_split_for_validation_takes_the_place_of_one_for_tests(name):
    sizes = {"train": 10, "extra": 3, name: 4}
    with pytest.raises(UsageError, match=f"write --data.test_split {name} to evaluate on it$") as refused:
        parts_of("test", sizes, "set")
    assert refused.value.repair == {"data.test_split": name}
    with pytest.raises(UsageError, match="write --data.train_split or --data.test_split with one of these") as refused:
        parts_of("test[:50%]", sizes, "set")
    assert refused.value.repair == {}


@pytest.mark.parametrize("whole", ["{}", "train+{}", "{} + train", "test+{}+all"])
@pytest.mark.parametrize("part", ["train[5:3]", "train[50%:30%]", "train[-5:-7]"])
def test_a_reversed_part_is_named_and_takes_no_examples_from_the_others(whole, part):
    with pytest.raises(UsageError, match=rf"^split '{re.escape(part)}' starts at .* write 'train\[3:5\]'"):
        parts_of(whole.format(part), SIZES, "set")


@pytest.mark.parametrize("expression", ["train[:0]", "train[4:4]", "train[:0%]+train[100%:]"])
def test_a_split_without_examples_is_refused(expression):
    with pytest.raises(UsageError, match=f"^split '{re.escape(expression)}' is empty"):
        parts_of(expression, SIZES, "set")


@pytest.mark.parametrize(("k", "count"), [(0, 8), (50, 8), (80, 8)])
def test_a_fold_may_have_an_empty_part(k, count):
    parts = parts_of(f"train[:{k}%]+train[{k + 20}%:]", SIZES, "set")
    assert sum(part[2] - part[1] for part in parts) == count


def test_all_splits_may_include_an_empty_one():
    assert parts_of("all", {"train": 2, "extra": 0}, "set") == [("train", 0, 2), ("extra", 0, 0)]


def test_base_names():
    assert base_names("train[:10%]+ test") == ["train", "test"]
