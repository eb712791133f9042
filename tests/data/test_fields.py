import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.data import Image, Label, Length, Mask, Numbers, Tokens, batch_shapes
from mpjax.errors import UsageError


def test_origins_do_not_make_fields_different():
    assert Label(3, origin="column 'kind'") == Label(3)
    assert str(Label(3, origin="column 'kind'")) == "Label(num_classes=3)"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (
            Label(3, origin="column 'kind'"),
            np.float16(1),
            r"^label \(column 'kind'\): dtype float16; .*label.astype\(np.int",
        ),
        (
            Image((2, 2, 1), origin="column 'img'"),
            np.zeros((2, 2, 1), np.int64),
            r"^label \(column 'img'\): dtype int64",
        ),
        (Image((2, 2, 1), origin="column 'img'"), np.full((2, 2, 1), np.nan), r"^label \(column 'img'\): 4 of 4"),
        (Image((2, 2, 1), origin="column 'img'"), np.zeros((2, 2, 3)), r"^label \(column 'img'\): shape \(2, 2, 3\)"),
        (Mask((2, 2), 2, origin="column 'seg'"), np.full((2, 2), 2), r"^label \(column 'seg'\): 2 is outside \[0, 2\)"),
        (
            Tokens(2, 5, origin="column 'body'"),
            np.zeros(3, int),
            r"^label \(column 'body'\): shape \(3,\); wanted \[2\]",
        ),
    ],
)
def test_refusals_name_the_column(field, value, says):
    with pytest.raises(UsageError, match=says):
        field.settle("label", np.asarray(value))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_masks_become_int32(dtype):
    settled = Mask((None, 2), 3, ignores=True).settle("mask", np.array([[0, 2], [255, 1]], dtype))
    assert settled.dtype == np.int32
    assert settled.tolist() == [[0, 2], [255, 1]]


def test_a_mask_has_the_size_of_its_image():
    with pytest.raises(UsageError, match=r"mask: shape \(3, 2\); wanted \[2, 2\] per example, the size of its image"):
        Mask((2, 2), 3).settle("mask", np.zeros((3, 2), np.uint8))


@pytest.mark.parametrize("value", [3, 254, -1])
def test_a_class_that_a_mask_does_not_have(value):
    with pytest.raises(UsageError, match=rf"mask: {value} is outside \[0, 3\)"):
        Mask((1, 1), 3).settle("mask", np.array([[value]]))


def test_so_many_classes_that_one_would_not_count():
    assert Mask((1, 1), 255).settle("mask", np.array([[254]])).tolist() == [[254]]
    with pytest.raises(UsageError, match="mask: 256 classes; wanted at most 255"):
        Mask((1, 1), 256)


def test_tokens_are_below_the_vocabulary():
    assert Tokens(2, 50257).settle("tokens", np.array([50256, 0], np.uint16)).tolist() == [50256, 0]
    with pytest.raises(UsageError, match=r"tokens: 259 is outside \[0, 259\)"):
        Tokens(2, 259).settle("tokens", np.array([0, 259]))


def test_a_length_may_be_all_of_it():
    assert Length(4).settle("length", np.asarray(4)).dtype == np.int32
    with pytest.raises(UsageError, match="length: 5 is outside"):
        Length(4).settle("length", np.asarray(5))


def test_labels_beyond_int32():
    with pytest.raises(UsageError, match="do not fit int32"):
        Label(2**31 + 1).settle("label", np.asarray(1))


@pytest.mark.parametrize(
    ("dtype", "values", "says"),
    [
        (np.int32, np.array([-(2**40), 1]), r"^x: -1099511627776 does not fit int32; wanted numbers from -2\*\*31 up"),
        (np.int32, np.array(2**40), "^x: 1099511627776 does not fit int32"),
        (np.float32, np.array([np.inf, -1e300, 1.0]), r"^x: -1e\+300 overflows float32"),
    ],
)
def test_a_number_that_does_not_fit_is_the_one_that_is_named(dtype, values, says):
    with pytest.raises(UsageError, match=says):
        Numbers(values.shape, np.dtype(dtype)).settle("x", values)


@pytest.mark.parametrize(
    ("field", "rank"), [(Image((1, 1, 1)), 3), (Mask((1, 1), 1), 2), (Tokens(1, 1), 1), (Label(1), 0)]
)
def test_any_batch_axes_go_before(field, rank):
    assert field.rank == rank
    assert field.settle("x", np.zeros((4, 5, *[1] * rank), np.uint8)).shape == (4, 5, *[1] * rank)


def test_batches_have_the_dtypes_of_the_contract():
    fields = {"image": Image((8, 6, 3)), "mask": Mask((8, 6), 4), "tokens": Tokens(5, 9), "length": Length(5)}
    found = {name: (x.shape, x.dtype) for name, x in batch_shapes(fields, 2).items()}
    assert found == {
        "image": ((2, 8, 6, 3), jnp.uint8),
        "mask": ((2, 8, 6), jnp.int32),
        "tokens": ((2, 5), jnp.int32),
        "length": ((2,), jnp.int32),
    }
