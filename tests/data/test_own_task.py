"""All columns of a data set, for a task of the user's own."""

import io

import numpy as np
import pytest
from PIL import Image as Pillow

from mpjax.config import Data, PythonObject
from mpjax.data import Image, Label, Mask, Numbers, Table, all_columns, batch_fields, open_source, train_batches
from mpjax.data.sources import ArrayRows
from mpjax.errors import UsageError


ARRAYS = {
    "image": np.zeros((4, 2, 2, 3), np.uint8),
    "label": np.array([3, 2049, 7, 1]),
    "box": np.arange(16, dtype=np.float64).reshape(4, 4),
    "valid": np.array([True, False, True, True]),
}


def opened(arrays=ARRAYS, **settings):
    config = Data(name=PythonObject(lambda: (arrays, arrays)), batch_size=4, eval_batch_size=4, **settings)
    return open_source(config, None, "own"), config


def test_every_column_is_a_field_with_its_values():
    source, config = opened()
    assert source.fields == {
        "image": Image((2, 2, 3)),
        "label": Numbers((), np.dtype(np.int32)),
        "box": Numbers((4,), np.dtype(np.float32)),
        "valid": Numbers((), np.dtype(bool)),
    }
    assert batch_fields(source, config) == source.fields
    batch = next(train_batches(source, config, 0).from_position(0))
    order = np.argsort(batch["box"][:, 0])
    assert batch["label"][order].tolist() == [3, 2049, 7, 1]
    assert batch["valid"][order].tolist() == [True, False, True, True]
    assert {name: str(values.dtype) for name, values in batch.items()} == {
        "image": "uint8",
        "label": "int32",
        "box": "float32",
        "valid": "bool",
    }


def test_a_number_of_classes_makes_the_label_one():
    source, _ = opened(num_classes=3000)
    assert source.fields["label"] == Label(3000)


def test_named_columns_alone_are_read():
    source, _ = opened(columns={"x": "box", "y": "label"})
    assert list(source.fields) == ["x", "y"]
    with pytest.raises(UsageError, match="--data.columns: .* has no boxes; it has image, label, box, valid"):
        opened(columns={"x": "boxes"})


def test_a_function_says_which_fields_there_are():
    source, _ = opened(
        preprocess=PythonObject(lambda example: {"image": example["image"][:1], "sum": example["box"].sum()})
    )
    assert source.fields == {"image": Image((1, 2, 3)), "sum": Numbers((), np.dtype(np.float32))}
    with pytest.raises(UsageError, match="has no fields; wanted at least one; a function for --data.preprocess must"):
        opened(preprocess=PythonObject(lambda example: {}))


def test_text_is_an_error_that_says_what_to_do():
    with pytest.raises(UsageError, match="name is text; wanted numbers; convert it with --data.preprocess"):
        opened([{"name": "a", "x": 1.0}])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, 2**40, 3, 4], "does not fit int32"),
        ([1.0, 1e300, 3.0, 4.0], "overflows float32"),
        ([1, 2.5, 3, 4], "dtype float64; wanted int32, that of the first example"),
        ([[1], [1, 2], [3], [4]], r"shape \(2,\); wanted \(1,\), that of the first example"),
    ],
)
def test_no_value_is_changed_in_silence(values, said):
    rows = [{"x": np.asarray(value)} for value in values]
    source, config = opened(rows)
    with pytest.raises(UsageError, match=said):
        train_batches(source, config, 0)


def test_an_encoded_mask_has_its_class_numbers_under_any_name():
    """A LabeledImage of tensorflow-datasets stays encoded; a palette's colours are only for display."""
    stored = io.BytesIO()
    picture = Pillow.fromarray(np.array([[0, 2]], np.uint8), "P")
    picture.putpalette([9, 9, 9] * 3)
    picture.save(stored, "PNG")
    examples = ArrayRows({"organs": np.array([stored.getvalue()], object)})
    source = all_columns(Table("set", {"organs": Mask((1, 2), 3)}, lambda names: (examples, examples)), Data())
    assert source.fields == {"organs": Numbers((1, 2, 1), np.dtype(np.int32))}
    assert source.test[0]["organs"].tolist() == [[[0], [2]]]
