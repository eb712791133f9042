"""What the labels of both splits say before a run: splits by class, labels that are no classes, all ignored."""

import warnings

import numpy as np
import pytest

from mpjax.config import Data, PythonObject
from mpjax.data import Label, batch_fields, check_labels, eval_batches, open_source, train_batches
from mpjax.errors import DataWarning, UsageError


def check(train, test, num_classes=None, names=(), **settings):
    arrays = [{"image": np.zeros((len(x), 1, 1, 1), np.uint8), "label": np.asarray(x)} for x in (train, test)]
    classes = num_classes or int(max(np.max(train), np.max(test))) + 1
    parts = {"batch_size": 1, "eval_batch_size": 4, "num_classes": classes}
    config = Data(**{"name": PythonObject(lambda: tuple(arrays)), **parts, **settings})
    source = open_source(config, None)
    fields = {**batch_fields(source, config)}
    if names:
        fields["label"] = Label(classes, names=names)
    check_labels(fields, train_batches(source, config, 0), eval_batches(source, config), config)


def said(*arguments, **settings):
    with pytest.warns(DataWarning) as found:
        check(*arguments, **settings)
    return str(found[0].message)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_part_of_rows_that_are_sorted_by_class_is_told():
    rows = np.repeat([0, 1], 40)
    text = said(rows[:72], rows[72:], names=("neg", "pos"), test_split="test[:100%]")
    assert text.startswith("label: the test split 'test[:100%]' has no example of 1 of the 2 classes of 'train'")
    assert "(neg), as where rows are sorted by class" in text


def test_classes_that_no_training_example_has_are_told():
    rows = np.repeat(np.arange(10), 20)
    assert said(rows[:160], rows[160:]) == (
        "label: 40 of the 40 examples of the test split 'test' have classes that no training example has (8, 9), and "
        "the test split 'test' has no example of 8 of the 8 classes of 'train' (0, 1, 2, 3, 4, ...), as where rows are "
        "sorted by class: parts of such a split are no random parts; shuffle the rows in the data once, or write a "
        "--data.test_split that has all classes"
    )


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("classes", [2, 10, 100, 1000])
@pytest.mark.parametrize("size", [10, 100, 1000])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_splits_say_nothing_however_rare_the_classes(classes, size, seed):
    """The sizes of the classes fall as 1 / n, so that many have one example, and some are in one split only."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, classes + 1)
    rows = generator.choice(classes, 10 * size, p=weights / weights.sum())
    check(rows[:-size], rows[-size:], num_classes=classes)


@pytest.mark.usefixtures("quiet")
def test_a_test_split_of_some_more_of_one_class_says_nothing():
    check(np.repeat([0, 1, 2], 50), np.repeat([0, 1], 5))  # a third is missing
    check(np.arange(9), np.arange(9))  # few examples


def test_labels_that_are_nearly_all_different_are_told():
    text = said(np.arange(72), np.arange(72, 80))
    assert text == (
        "label: 72 of the 72 training examples have a class of their own, so that nothing can be learnt for others: is "
        "this the column of the classes? If not, write --data.columns label COLUMN"
    )


@pytest.mark.usefixtures("quiet")
def test_two_examples_of_each_class_are_classes():
    check(np.repeat(np.arange(40), 2), np.arange(40))


@pytest.mark.parametrize("in_memory_mb", [100, 0])
def test_a_test_split_that_is_ignored_as_a_whole_is_an_error(in_memory_mb):
    message = "every label of split 'test' is ignored by --data.ignore_index 0 1; wanted some that count"
    with pytest.raises(UsageError, match=message):
        check([0, 1, 2, 2], [0, 1, 1, 0, 1], num_classes=3, ignore_index=(0, 1), in_memory_mb=in_memory_mb)
    check([0, 1, 2, 2], [0, 1, 1, 0, 2], num_classes=3, ignore_index=(0, 1), in_memory_mb=in_memory_mb)


def test_a_training_split_that_is_ignored_as_a_whole_is_an_error():
    with pytest.raises(UsageError, match="every label of split 'train' is ignored by --data.ignore_index 0 1"):
        check([0, 1], [0, 2], num_classes=3, ignore_index=(0, 1))


def test_masks_that_are_ignored_as_a_whole_are_an_error():
    train = {"image": np.zeros((4, 2, 2, 1), np.uint8), "mask": np.arange(16).reshape(4, 2, 2) % 2}
    test = {"image": train["image"], "mask": np.full((4, 2, 2), 7)}
    settings = {"num_classes": 2, "ignore_index": (7,), "batch_size": 1, "eval_batch_size": 2}
    config = Data(name=PythonObject(lambda: (train, test)), **settings)

    def checked():
        source = open_source(config, None, "segmentation")
        check_labels(source.fields, train_batches(source, config, 0), eval_batches(source, config), config)

    message = "every pixel of the masks of split 'test' is ignored by --data.ignore_index 7"
    with pytest.raises(UsageError, match=message):
        checked()
    test["mask"][2, 0, 0] = 1
    checked()
