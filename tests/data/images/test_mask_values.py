"""Stored values of masks become class numbers as the user says, or as the data set has it; never by accident."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.config import Data
from mpjax.data import IGNORED
from mpjax.data.images import MaskValues, mask_values
from mpjax.errors import DataWarning, UsageError


class Masks(list):
    """Examples with these masks."""

    def __getitem__(self, index):
        return {"mask": np.asarray(super().__getitem__(index))}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def found(masks, num_classes, **config):
    """The meaning of the values, and what was told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        values = mask_values(Masks(masks), num_classes, Data(**config), "cells")
    assert all(issubclass(each.category, DataWarning) for each in told)
    return values, [str(each.message) for each in told]


def test_class_numbers_mean_themselves():
    values, told = found([[[0, 1], [2, 1]]], 3)
    assert (values, told) == (MaskValues((0, 1, 2), (), "cells"), [])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint16])
def test_masks_of_0_and_255_are_two_classes_and_that_is_told(dtype):
    values, told = found([np.array([[0, 255], [255, 255]], dtype)], 2)
    assert told == [
        "mask: the stored values 0, 255 are used as classes 0 to 1: exactly 2 values occur in 1 of 1 masks of 'cells'"
    ]
    numbers = values.class_numbers(np.array([[0, 255]], dtype))
    assert (numbers.tolist(), numbers.dtype) == ([[0, 1]], np.uint8)


def test_what_does_not_count_is_asked_for():
    masks = [[[0, 1, 255, 2]]]
    with pytest.raises(UsageError) as raised:
        found(masks, 3)
    assert str(raised.value) == (
        "mask: the stored values in 1 of 1 masks of 'cells' are 0, 1, 2, 255, but the 3 classes of the task are 0 to 2"
        "; write --data.mask_values with the stored value of each class, as in --data.mask_values 0 255, or "
        "--data.ignore_index 255 to ignore pixels of that value"
    )
    values, told = found(masks, 3, ignore_index=(255,))
    assert told == []
    assert values.class_numbers(np.array([[0, 1, 255, 2]])).tolist() == [[0, 1, IGNORED, 2]]


def test_a_class_that_does_not_count_keeps_its_number():
    values, told = found([[[0, 1, 2]]], 3, ignore_index=(0,))
    assert told == []
    assert values.class_numbers(np.array([0, 1, 2])).tolist() == [IGNORED, 1, 2]


def test_the_stored_values_can_be_given_in_any_order():
    values, told = found([[[7, -1, 300]]], 3, mask_values=(300, 7, -1))
    assert told == []
    assert values.class_numbers(np.array([7, -1, 300])).tolist() == [1, 2, 0]


@pytest.mark.parametrize(("given_values", "ignored"), [((0, 255, 1), ()), ((0,), ()), ((0, 0), ()), ((0, 255), (255,))])
def test_values_that_contradict_the_classes_are_errors(given_values, ignored):
    with pytest.raises(UsageError, match="--data.mask_values 0.*: wanted 2 different values, one for each class"):
        found([[[0, 255]]], 2, mask_values=given_values, ignore_index=ignored)


def test_a_value_that_appears_later_is_an_error_that_names_it():
    values, _ = found([[[0, 255]]], 2)
    for mask in (np.array([0, 254], np.uint8), np.array([0, -1]), np.array([70_000])):
        with pytest.raises(
            UsageError, match=rf"mask: value {mask[-1]} of 'cells' is not one of 0, 255; write --data.mask_v"
        ):
            values.with_class_numbers({"mask": mask})


def test_a_class_that_no_mask_has_is_told():
    _, told = found([[[0, 1]], [[1, 1]]], 4)
    assert told == ["mask: class 2, 3 of 4 does not occur in 2 of 2 masks of 'cells'"]


@pytest.mark.parametrize(
    ("mask", "told"),
    [([0, 1, 9, 9], []), ([0, 1, 9, 9, 9], ["60% of the pixels are ignored by --data.ignore_index 9"])],
)
def test_masks_most_of_which_do_not_count_are_told(mask, told):
    _, said = found([mask], 2, ignore_index=(9,))
    assert [text[len("mask: ") :].partition(",")[0] for text in said] == told


def test_masks_that_are_no_integers_are_errors():
    with pytest.raises(UsageError, match="mask: dtype float64; wanted integers; write mask.astype"):
        found([[[0.0, 1.0]]], 2)


@settings(max_examples=50)
@given(
    values=st.lists(st.integers(-300, 300), min_size=1, max_size=5, unique=True),
    ignored=st.lists(st.integers(301, 303), max_size=2, unique=True),
    data=st.data(),
)
def test_any_values_come_back_as_what_they_mean(values, ignored, data):
    mask = np.array(data.draw(st.lists(st.sampled_from(values + ignored), min_size=1, max_size=20)))
    wanted = [IGNORED if value in ignored else values.index(value) for value in mask.tolist()]
    meaning = MaskValues(tuple(values), tuple(ignored), "cells")
    assert meaning.class_numbers(mask).tolist() == wanted
    if mask.min() >= 0 and mask.max() <= 255:
        assert meaning.class_numbers(mask.astype(np.uint8)).tolist() == wanted
