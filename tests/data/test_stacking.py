import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.data import Label, Numbered, Numbers, Tokens, conform_all, labelled_images, stacking
from mpjax.errors import UsageError


NAMED = Numbered("split 'train' of 'mine'", (40, 41, 42))
IMAGES = labelled_images(3, (1, 1, 1))


def pixels(*values, dtype=np.uint8):
    return [np.full((1, 1, 1), value, dtype) for value in values]


def test_the_values_of_a_batch():
    found = conform_all({"image": pixels(5, 6, 7), "label": [2, 0, 1]}, IMAGES, NAMED)
    assert (found["image"].shape, found["image"].dtype, found["label"].dtype) == ((3, 1, 1, 1), np.uint8, np.int32)
    assert (found["image"].ravel().tolist(), found["label"].tolist()) == ([5, 6, 7], [2, 0, 1])


def test_an_array_of_all_examples_is_not_copied():
    whole = stacking.aligned((3, 1, 1, 1), np.dtype(np.uint8))
    assert conform_all({"image": whole, "label": [0, 0, 0]}, IMAGES, NAMED)["image"] is whole


def test_float64_among_float32_becomes_float32():
    images = [*pixels(0.25, 0.5, dtype=np.float32), *pixels(0.75, dtype=np.float64)]
    found = conform_all({"image": images, "label": [0, 0, 0]}, IMAGES, NAMED)["image"]
    assert (found.dtype, found.ravel().tolist()) == (np.float32, [0.25, 0.5, 0.75])


@pytest.mark.parametrize(
    ("fields", "column", "said"),
    [
        # NumPy stacks 1, True and 2 as integers, and 1, 2.0 and 2 as floating point.
        ({"label": Label(3)}, [1, True, 2], r"label: dtype bool; .*\(example 41 of split 'train' of 'mine'\)"),
        ({"label": Label(3)}, [1, 1, 2.0], r"label: dtype float64; .*\(example 42 of "),
        ({"x": Numbers((), np.dtype(np.float32))}, [0.5, 1, 1.5], r"x: dtype int64; .*\(example 41 of "),
        ({"label": Label(3)}, [0, 3, 5], r"label: 3 is outside \[0, 3\).*\(example 41 of "),
        ({"label": Label(3)}, [[0, 1]] * 3, r"label: shape \(2,\); wanted 0 axes per example \(example 40 of "),
        ({"tokens": Tokens(2, 9)}, [[1, 2], [3], [4, 5]], r"tokens: shape \(1,\); wanted \[2\].*\(example 41 of "),
    ],
)
def test_the_first_example_that_does_not_fit_is_named(fields, column, said):
    with pytest.raises(UsageError, match=said):
        conform_all({next(iter(fields)): column}, fields, NAMED)


VALUES = st.one_of(
    st.integers(-2, 4),
    st.booleans(),
    st.sampled_from([1.0, 2**31, 2**63, np.int8(1), np.uint8(2), np.float32(1), [1], [[1]], [1, 2], "a"]),
)


@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from([Label(3), Numbers((), np.dtype(np.float32))]))
@settings(max_examples=300)
def test_a_batch_checked_at_once_is_as_if_checked_one_by_one(values, field):
    def attempt():
        try:
            found = conform_all({"x": values}, {"x": field}, Numbered("mine", range(len(values))))["x"]
        except UsageError as error:
            return str(error)
        return found.dtype, found.tolist()

    at_once = attempt()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacking, "_conform_at_once", lambda columns, fields: None)
        assert at_once == attempt()
