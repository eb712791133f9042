"""Labels to ignore: marked as -1 in every kind of data set, and an error where nobody named them."""

import numpy as np
import pytest

from mpjax.config import Data, PythonObject
from mpjax.data import Label, Source, Tokens, labelled_images, open_source, train_batches, with_ignored
from mpjax.errors import UsageError


def arrays(*labels, dtype=np.int64):
    return {"image": np.zeros((len(labels), 2, 2, 1), np.uint8), "label": np.array(labels, dtype)}


def batch_of(labels, **settings):
    config = Data(name=PythonObject(lambda: (labels, labels)), num_classes=3, batch_size=3, **settings)
    source = open_source(config, None)
    return source, next(train_batches(source, config, 0).from_position(0))["label"]


@pytest.mark.parametrize("label", [-1, 255])
def test_a_label_outside_is_an_error_unless_it_is_ignored(label):
    with pytest.raises(UsageError, match=rf"label: {label} is outside \[0, 3\).*write --data.ignore_index"):
        batch_of(arrays(0, label, 2))
    source, labels = batch_of(arrays(0, label, 2), ignore_index=(label,))
    assert sorted(labels) == [-1, 0, 2]
    assert source.fields["label"] == Label(3, ignores=True)


def test_what_is_ignored_is_only_what_is_named():
    with pytest.raises(UsageError, match="label: -1 is outside the classes, and not among --data.ignore_index 255"):
        batch_of(arrays(0, -1, 255), ignore_index=(255,))
    with pytest.raises(UsageError, match=r"label: 7 is outside \[0, 3\)"):
        batch_of(arrays(0, 7, 255), ignore_index=(255,))


def test_unsigned_labels_stay_integers():
    change = with_ignored([2**63])
    found = np.asarray([change({"label": label})["label"] for label in np.array([2**63, 1], np.uint64)])
    assert found.tolist() == [-1, 1]
    assert found.dtype.kind == "i"


def test_a_source_is_final():
    source = Source("mine", labelled_images(3, (2, 2, 1)), [], [])
    with pytest.raises(UsageError, match="--data.ignore_index 1: .* returns a Source, whose examples are final"):
        open_source(Data(name=PythonObject(lambda: source), ignore_index=(1,)), None)


@pytest.mark.parametrize("end", [None, 0])
def test_a_source_says_itself_what_begins_a_document(end):
    source = Source("mine", {"tokens": Tokens(5, 9, document_end=end)}, [], [])
    config = Data(name=PythonObject(lambda: source), documents="apart")
    if end is None:
        with pytest.raises(UsageError, match=r"--data.documents apart: .* write Tokens\(..., document_end=NUMBER\)"):
            open_source(config, None, "language_modeling")
    else:
        assert open_source(config, None, "language_modeling") is source


@pytest.mark.extra
def test_ignored_labels_of_a_table_are_no_classes(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.csv").write_text("text,label\na,0\nb,-1\nc,1\nd,255\n")
    config = Data(name=f"hf:csv:{tmp_path}", test_split="train", length=4)
    with pytest.raises(UsageError, match="-1 is negative; wanted class numbers from 0"):
        open_source(config, None, "text_classification")
    settings = Data(name=config.name, test_split="train", length=4, ignore_index=(-1, 255))
    source = open_source(settings, None, "text_classification")
    assert source.fields["label"] == Label(2, ignores=True)
    assert [int(x["label"]) for x in source.train.__getitems__(range(4))] == [0, -1, 1, -1]


@pytest.mark.extra
def test_an_ignored_value_may_be_one_that_the_column_cannot_hold():
    datasets = pytest.importorskip("datasets")
    from mpjax.data.sources import classes_in

    split = datasets.Dataset.from_dict({"y": [0, 2, 255]}, features=datasets.Features(y=datasets.Value("uint8")))
    label, _ = classes_in("y", "set", *[split.with_format("arrow")] * 2, ignored=(-1, 255, 256))
    assert label == Label(3)
