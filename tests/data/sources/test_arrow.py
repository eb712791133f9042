import numpy as np
import pyarrow as pa
import pytest

from mpjax.data.sources import numbers
from mpjax.errors import UsageError


NESTED = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 1, 255]]]


@pytest.mark.parametrize("dtype", [pa.uint8(), pa.int64(), pa.float16(), pa.float32(), pa.float64(), pa.uint16()])
def test_dtypes_are_those_that_were_stored(dtype):
    values = np.array([1, 2], dtype.to_pandas_dtype())
    assert numbers(pa.array(values, dtype), "x").dtype == values.dtype
    assert numbers(pa.array([[1, 2]], pa.list_(pa.uint8())), "x").dtype == np.uint8


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda value: pa.list_(value, 3)])
def test_lists_in_lists(kind):
    column = pa.array(NESTED, pa.list_(kind(pa.uint8())))
    found = numbers(column, "x")
    assert (found.shape, found.tolist()) == ((2, 2, 3), NESTED)
    np.testing.assert_array_equal(numbers(column[1:], "x"), [NESTED[1]])
    np.testing.assert_array_equal(numbers(pa.chunked_array([column, column[:1]]), "x")[2], NESTED[0])


def test_lists_of_several_lengths():
    with pytest.raises(UsageError, match="column 'x': lists of 1 to 2 values; wanted lists of equal length"):
        numbers(pa.array([[1], [1, 2]]), "column 'x'")


@pytest.mark.parametrize("values", [[1, None, 3], [[1], None, [2]], [[1], [None], [2]]])
def test_missing_values(values):
    with pytest.raises(UsageError, match="column 'x': 1 of 3 values are missing, the first in row 1"):
        numbers(pa.array(values), "column 'x'")


def test_no_numbers():
    with pytest.raises(UsageError, match="column 'x': string; wanted numbers"):
        numbers(pa.array(["a"]), "column 'x'")
