"""Transforms move numbers there and back."""

import numpy as np
import pytest

from mpjax.models.pretrained.layouts import CONV, LINEAR, SAME, reshaped


@pytest.mark.parametrize(
    ("transform", "theirs", "ours"),
    [
        (SAME, (5,), (5,)),
        (LINEAR, (2, 3), (3, 2)),
        (CONV, (8, 3, 5, 7), (5, 7, 3, 8)),
        (reshaped((1, 6), (6,)), (1, 6), (6,)),
        (LINEAR.then(reshaped((6, 8), (6, 2, 4))), (8, 6), (6, 2, 4)),
    ],
)
def test_writing_is_the_inverse_of_reading(transform, theirs, ours):
    array = np.arange(np.prod(theirs)).reshape(theirs)
    assert transform.read(array).shape == ours
    np.testing.assert_array_equal(transform.write(transform.read(array)), array)


def test_a_convolutions_axes_go_where_flax_has_them():
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)  # out, in, height, width
    assert CONV.read(array)[3, 4, 2, 1] == array[1, 2, 3, 4]


def test_heads_are_split_in_order():
    array = np.arange(4 * 3).reshape(4, 3)  # out, in
    split = LINEAR.then(reshaped((3, 4), (3, 2, 2)))
    assert split.name == "transposed, 3x4 to 3x2x2"
    assert split.read(array)[2, 1, 0] == array[2, 2]


def test_an_array_of_another_shape_is_not_reshaped_in_silence():
    with pytest.raises(ValueError, match=r"shape \(6, 2\) where \(4, 3\) is wanted"):
        reshaped((4, 3), (12,)).read(np.zeros((6, 2)))
