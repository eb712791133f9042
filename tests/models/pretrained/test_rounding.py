"""What a cast loses."""

import ml_dtypes
import numpy as np
import pytest

from mpjax.models.pretrained import cast, losses


@pytest.mark.parametrize(
    ("values", "dtype", "wanted"),
    [
        ([1, 2, 3], np.float32, (0, 0, 0, 0)),
        ([np.nan, np.inf, 1], np.float32, (2, 0, 0, 0)),
        ([np.nan, np.inf, 1], np.float16, (2, 0, 0, 0)),
        ([65504, 65519, 65520, -1e5], np.float16, (0, 2, 0, 15 / 65519)),
        ([6e-8, 3e-8, 2.9e-8, -1e-30, 0], np.float16, (0, 0, 2, (2**-24 - 3e-8) / 3e-8)),
        ([1 + 2**-8, 1 + 2**-9], ml_dtypes.bfloat16, (0, 0, 0, 2**-8 / (1 + 2**-8))),
        ([3.4e38, 1e-45], ml_dtypes.bfloat16, (0, 1, 1, 0)),
        ([], np.float16, (0, 0, 0, 0)),
    ],
)
def test_losses_are_counted_by_kind(values, dtype, wanted):
    got = losses(np.array(values, np.float32), np.dtype(dtype))
    assert got[:3] == wanted[:3]
    assert got.error == pytest.approx(wanted[3], rel=1e-6)


def test_losses_of_an_array_longer_than_a_piece_are_added_up():
    array = np.ones((3, 2**20 - 1), np.float32)
    array[0, 0], array[1, 5], array[2, -1] = 1e5, 1e-9, 1e6
    assert losses(array, np.dtype(np.float16))[:3] == (0, 2, 1)


def test_a_wider_dtype_loses_nothing():
    array = np.array([65504, 6e-8, 0.1], np.float16)
    assert losses(array, np.dtype(np.float32)) == (0, 0, 0, 0)
    np.testing.assert_array_equal(cast(array, np.dtype(np.float32)), array.astype(np.float32))


def test_a_cast_to_the_dtype_that_it_has_is_no_copy():
    array = np.ones(3, np.float32)
    assert cast(array, np.dtype(np.float32)) is array
