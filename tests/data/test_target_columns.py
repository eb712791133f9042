"""Numbers and labels beside images or texts: which columns they are, and what becomes of them."""

import numpy as np
import pytest

from mpjax.config import Data, PythonObject
from mpjax.data import Image, Label, Labels, NumericTarget, Other, Table, Text, open_source, with_targets
from mpjax.data.sources import ArrayRows
from mpjax.errors import UsageError


IMAGES = np.zeros((4, 2, 2, 1), np.uint8)


def opened(task, stored=None, *, preprocess="", targets=(), **columns):
    return opened_arrays({"image": IMAGES, **columns}, task, stored, preprocess=preprocess, targets=targets)


def opened_arrays(arrays, task, stored=None, **settings):
    config = Data(name=PythonObject(lambda: (arrays, arrays)), tokenizer="bytes", **settings)
    return open_source(config, None, task, stored)


def values_of(source, field):
    return np.stack([source.train[n][field] for n in range(4)])


def test_a_number_is_standardised_and_comes_back():
    source = opened("regression", target=np.array([1, 3, 1, 123457]))
    target = source.fields["target"]
    assert isinstance(target, NumericTarget)
    assert (target.columns, target.mean) == (("target",), (30865.5,))
    assert source.fields["image"] == Image((2, 2, 1))
    assert values_of(source, "target").dtype == np.float32
    assert target.in_units(values_of(source, "target")).tolist() == [[1], [3], [1], [123457]]


def test_large_numbers_come_back_without_a_warning_of_numpy():
    target = NumericTarget(("price", "tax"), (45_270_468.0, 0.5), (14_790_690.0, 0.25))
    with np.errstate(all="raise"):
        assert target.in_units([[0, 1], [-1, -2]]).tolist() == [[45_270_470, 0.75], [30_479_780, 0]]


def test_a_target_whose_deviation_float64_does_not_hold_is_told():
    with pytest.raises(UsageError, match=r"target 'target': its numbers, from 1e\+300 to 3e\+300.*a deviation of inf"):
        opened("regression", target=np.array([1e300, 3e300, 1e300, 3e300]))


def test_several_columns_and_a_column_of_lists_are_several_targets():
    x, y = np.array([1.0, 2, 3, 4]), np.array([10, 10, 20, 20])
    apart = opened("regression", targets=("x", "y"), x=x, y=y).fields["target"]
    lists = opened("regression", targets=("box",), box=np.stack([x, y], 1)).fields["target"]
    assert (apart.columns, lists.columns) == (("x", "y"), ("box[0]", "box[1]"))
    assert apart.mean == lists.mean == (2.5, 15.0)


def test_stored_statistics_are_used_again():
    first = opened("regression", target=np.array([1.0, 2, 3, 4]))
    again = opened("regression", first.encoding, target=np.array([100.0, 2, 3, 4]))
    assert again.fields["target"] == first.fields["target"]
    np.testing.assert_allclose(values_of(again, "target")[0], (100 - 2.5) / np.sqrt(1.25), rtol=1e-6)


def test_a_preprocess_function_gets_and_returns_numbers_in_their_units():
    def logarithm(example):
        return {"image": example["image"], "target": np.log10(example["target"])}

    source = opened("regression", preprocess=PythonObject(logarithm), target=np.array([1.0, 10, 100, 1000]))
    assert source.fields["target"].mean == (1.5,)


def test_labels_are_zeros_and_ones():
    source = opened("multilabel", labels=np.array([[0, 1], [1, 1], [0, 0], [1, 0]]))
    assert source.fields["labels"] == Labels(("labels[0]", "labels[1]"))
    assert values_of(source, "labels").tolist() == [[0, 1], [1, 1], [0, 0], [1, 0]]
    with pytest.raises(UsageError, match="2; wanted 0 or 1"):
        source.fields["labels"].settle("labels", np.array([[0, 2]]))


@pytest.mark.parametrize(
    ("columns", "targets", "message"),
    [
        ({"age": np.arange(4.0)}, (), "which columns have the target to predict.*write --data.targets COLUMN"),
        ({"age": np.arange(4.0)}, ("aeg",), "--data.targets aeg: .*did you mean age"),
        ({"age": ["1", "2", "3", "x"]}, ("age",), "column 'age' of .* is text; .*write --task classification"),
        ({"age": np.array([1, np.nan, 2, 3])}, ("age",), "target 'age' is nan in example 1 of split 'train'"),
        ({"age": np.full(4, 7)}, ("age",), "target 'age' is 7.0 in all training examples"),
        ({"age": np.arange(4) + 1j}, ("age",), "target: dtype complex128; wanted numbers; store .* as floats"),
        ({"age": np.arange(4).astype("datetime64[D]")}, ("age",), r"target: dtype datetime64\[D\]; wanted numbers"),
    ],
)
def test_what_cannot_be_predicted_is_told(columns, targets, message):
    with pytest.raises(UsageError, match=message):
        opened("regression", targets=targets, **columns)


def test_numbers_of_named_classes_are_no_targets():
    rows = ArrayRows({"image": IMAGES, "label": np.arange(4)})
    columns = {"image": Image((2, 2, 1)), "label": Label(2, names=("cat", "dog"))}
    table = Table("folder:pets", columns, lambda names: (rows, rows))
    with pytest.raises(UsageError, match="which columns have the target"):
        with_targets(table, "regression", Data(), None)
    with pytest.raises(UsageError, match="has classes with names.*--task classification"):
        with_targets(table, "regression", Data(targets=("label",)), None)


REVIEWS = {"review": ["ab", "", "abc", "b"], "stars": np.array([1.0, 2, 3, 4])}


def test_numbers_are_predicted_from_texts_where_there_are_no_images():
    source = opened_arrays(REVIEWS, "regression", targets=("stars",), length=4)
    target = source.fields["target"]
    assert list(source.fields) == ["tokens", "length", "target"]
    assert (target.columns, target.mean) == (("stars",), (2.5,))
    assert [example["length"] for example in source.train] == [4, 2, 4, 3]  # with a start and an end, cut to 4
    assert target.in_units(np.stack([example["target"] for example in source.train])).tolist() == [[1], [2], [3], [4]]
    assert "1 of 4 texts looked at have more than 4 tokens" in source.notes[-1]
    assert source.notes[0].startswith("targets are standardised")


def test_labels_are_predicted_from_joined_texts():
    columns = {"first": ["a", "b", "c", "d"], "second": ["e", "f", "g", "h"], "labels": np.eye(4, 2, dtype=int)}
    source = opened_arrays(columns, "multilabel", text_template="{first}{second}", length=4)
    assert [example["labels"].tolist() for example in source.train] == [[1, 0], [0, 1], [0, 0], [0, 0]]
    assert source.train[1]["tokens"].tolist() == [2, 101, 105, 1]


def test_texts_beside_images_are_read_if_they_are_named():
    columns = {"image": IMAGES, **REVIEWS}
    assert "image" in opened_arrays(columns, "regression", targets=("stars",)).fields
    texts = opened_arrays(columns, "regression", targets=("stars",), columns={"text": "review"})
    assert list(texts.fields) == ["tokens", "length", "target"]


def test_a_preprocess_function_gets_and_returns_texts_and_numbers():
    def shorter(example):
        return {"text": example["text"][:1], "target": example["target"] / 2}

    source = opened_arrays(REVIEWS, "regression", targets=("stars",), preprocess=PythonObject(shorter))
    assert source.fields["target"].mean == (1.25,)
    assert [example["length"] for example in source.train] == [3, 2, 3, 3]


def test_a_file_of_a_text_and_other_columns_is_read_as_said():
    rows = ArrayRows({"review": np.array(["a", "b"]), "stars": np.array([1.0, 2.0]), "year": np.array([1999, 2001])})
    columns = {"review": Text(), "stars": Other("float64", 0), "year": Other("int64", 0)}
    table = Table("hf:films.csv", columns, lambda names: (rows, rows))
    says = "--data.columns text review; from all columns, --data.name tabular:films.csv"
    with pytest.raises(UsageError, match=f"has a text, review, and other columns, year: .*{says}"):
        with_targets(table, "regression", Data(targets=("stars",)), None)
    config = Data(targets=("stars",), columns={"text": "review"}, tokenizer="bytes")
    assert with_targets(table, "regression", config, None).fields["target"].mean == (1.5,)
