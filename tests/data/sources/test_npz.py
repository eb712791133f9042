"""Files of NumPy's arrays: their splits and columns, what is refused, and that nothing in them is executed."""

import os
import pathlib
import zipfile

import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import Image, Label, open_source
from mpjax.data.sources import NumpyFile
from mpjax.errors import UsageError


IMAGES = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
LABELS = np.array([0, 1, 2, 0, 1, 2])
PARTS = {"train_split": "train[:4]", "test_split": "train[4:]"}


def written(tmp_path, save=np.savez, **arrays):
    save(tmp_path / "set.npz", **arrays)
    return str(tmp_path / "set.npz")


def opened(path, task="classification", **settings):
    return open_source(Data(name=path, **settings), None, task)


def labels(examples):
    return [int(example["label"]) for example in examples.__getitems__(range(len(examples)))]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(("image", "label"), [("x", "y"), ("X", "Y"), ("images", "labels"), ("image", "label")])
def test_two_arrays_are_one_split_and_a_gray_image_gets_its_channel(tmp_path, save, image, label):
    source = opened(written(tmp_path, save, **{image: IMAGES, label: LABELS}), **PARTS)
    assert source.fields == {"image": Image((4, 5, 1)), "label": Label(3)}
    assert (labels(source.train), labels(source.test)) == ([0, 1, 2, 0], [1, 2])
    assert source.test[1]["image"].dtype == np.uint8
    assert np.array_equal(source.test[1]["image"][..., 0], IMAGES[5])


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),  # as keras.datasets.mnist stores them
        ("train_images", "train_labels", "test_images", "test_labels"),  # as MedMNIST does
        ("X_TRAIN", "Y_TRAIN", "X_TEST", "Y_TEST"),
    ],
)
def test_splits_are_read_from_the_names_of_the_arrays(tmp_path, names):
    arrays = dict(zip(names, (IMAGES[:4], LABELS[:4], IMAGES[4:], LABELS[4:]), strict=True))
    source = opened(written(tmp_path, **arrays, version=np.int64(3)))
    assert (labels(source.train), labels(source.test)) == ([0, 1, 2, 0], [1, 2])
    assert np.array_equal(source.test[0]["image"][..., 0], IMAGES[4])


@pytest.mark.parametrize("stored", [LABELS.astype(float), np.asarray(["a", "b", "c", "a", "b", "c"])])
def test_the_advice_on_labels_in_rows_of_their_own_is_not_to_take_their_largest(tmp_path, stored):
    with pytest.raises(UsageError, match=r"wanted one class number per example; store y\[:, 0\]") as error:
        opened(written(tmp_path, x=IMAGES, y=stored[:, None]), **PARTS)
    assert "argmax" not in str(error.value)


def test_two_arrays_that_are_one_column_of_a_split_are_an_error(tmp_path):
    path = written(tmp_path, x_train=IMAGES, train_x=IMAGES[::-1], y_train=LABELS)
    with pytest.raises(UsageError, match="'x_train' and 'train_x' are one column of one split"):
        opened(path, test_split="train")


def test_one_name_like_that_of_a_split_among_others_makes_no_split(tmp_path):
    path = written(tmp_path, x=IMAGES, y=LABELS, val_loss=np.zeros(3))
    assert labels(opened(path, **PARTS).test) == [1, 2]


def test_a_label_in_a_row_of_its_own_is_a_class_number(tmp_path):
    source = opened(written(tmp_path, x=IMAGES, y=LABELS[:, None].astype(np.uint8)), **PARTS)
    assert source.fields["label"] == Label(3)
    assert labels(source.test) == [1, 2]


def test_classes_are_those_of_the_whole_file_whatever_the_splits(tmp_path):
    """In a run on two of three splits, a name has the number that it has in a run on the others."""
    names = {"train": ["b", "d"], "val": ["b", "b"], "test": ["a", "d"]}
    arrays = {f"{split}_labels": np.array(values) for split, values in names.items()}
    arrays |= {f"{split}_images": IMAGES[:2] for split in names}
    source = opened(written(tmp_path, **arrays), test_split="val")
    assert source.fields["label"].names == ("a", "b", "d")
    assert (labels(source.train), labels(source.test)) == ([1, 2], [1, 1])


def test_ignored_and_missing_labels_make_no_classes(tmp_path):
    arrays = {"x": IMAGES, "y": np.array([0, 255, 1, 0, 1, 255], np.uint8)}
    source = opened(written(tmp_path, **arrays), ignore_index=(255,), **PARTS)
    assert source.fields["label"].num_classes == 2
    assert (labels(source.train), labels(source.test)) == ([0, -1, 1, 0], [1, -1])


def test_colour_images_and_floats_stay_what_they_are(tmp_path):
    images = np.linspace(0, 1, 6 * 4 * 4 * 3, dtype=np.float64).reshape(6, 4, 4, 3)
    source = opened(written(tmp_path, x=images, y=LABELS), **PARTS)
    assert source.fields["image"] == Image((4, 4, 3))
    assert source.train[3]["image"].dtype == np.float64
    assert np.array_equal(source.train[3]["image"], images[3])


def test_arrays_of_another_length_are_no_columns(tmp_path):
    path = written(tmp_path, x=IMAGES, y=LABELS, class_names=np.array(["a", "b", "c"]), mean=np.float32(3))
    assert labels(opened(path, **PARTS).test) == [1, 2]


def test_rows_of_numbers_are_fields_of_an_own_task_in_their_shapes(tmp_path):
    features = np.arange(6 * 3, dtype=np.float32).reshape(6, 3)
    path = written(tmp_path, features=features, series=IMAGES, target=features[:, 0])
    source = opened(path, task="own", **PARTS)
    assert {name: field.shape for name, field in source.fields.items()} == {
        "features": (3,),
        "series": (4, 5),
        "target": (),
    }
    assert source.test[1]["features"].tolist() == [15, 16, 17]


def test_texts_are_classified(tmp_path):
    """As bytes: a start (2), each byte plus 3, an end (1)."""
    texts, kinds = np.array(["good film", "bad", "fine"]), np.array([b"pos", b"neg", b"pos"])
    source = opened(written(tmp_path, text=texts, label=kinds), "text_classification", length=4, test_split="train")
    assert source.fields["label"].names == ("neg", "pos")
    assert source.train[1] | {"tokens": source.train[1]["tokens"].tolist()} == {
        "tokens": [2, 101, 100, 1],
        "length": 4,
        "label": 0,
    }


def test_masks_belong_to_their_images(tmp_path):
    masks = (IMAGES % 3).astype(np.int64)
    source = opened(written(tmp_path, images=IMAGES, masks=masks), "segmentation", num_classes=3, **PARTS)
    assert np.array_equal(np.squeeze(source.test[0]["mask"]), masks[4])


class Harmful:
    """Unpickling it creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_objects_are_refused_and_never_executed(tmp_path):
    trap = str(tmp_path / "executed")
    path = written(tmp_path, x=IMAGES, y=np.array([Harmful(trap)] * 6, object))
    with pytest.raises(UsageError, match="set.npz: 'y' holds pickled Python objects, which are not read"):
        opened(path, **PARTS)
    assert not os.path.exists(trap)


def test_objects_beside_the_columns_do_not_matter(tmp_path):
    path = written(tmp_path, x=IMAGES, y=LABELS, note=np.array([None] * 6, object))
    assert labels(opened(path, **PARTS).test) == [1, 2]


def test_an_array_that_is_not_compressed_is_mapped_and_a_compressed_one_must_fit_into_memory(tmp_path):
    mapped = NumpyFile(tmp_path / "set.npz", most=0)
    written(tmp_path, x=np.asfortranarray(IMAGES))
    assert isinstance(mapped.array("x"), np.memmap)
    assert np.array_equal(mapped.array("x"), IMAGES)
    path = written(tmp_path, np.savez_compressed, x=np.zeros((6, 1000, 200), np.uint8), y=LABELS)
    with pytest.raises(UsageError, match="in memory, and with '.' they take 1 MB; write --data.in_memory_mb 2, or"):
        opened(path, in_memory_mb=1, **PARTS)
    assert labels(opened(path, in_memory_mb=2, **PARTS).test) == [1, 2]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_changed_byte_and_a_cut_file_are_errors(tmp_path, save):
    path = written(tmp_path, save, x=IMAGES, y=LABELS)
    whole = pathlib.Path(path).read_bytes()
    with zipfile.ZipFile(path) as file:
        at = file.getinfo("x.npy").header_offset + (200 if save is np.savez else 90)
    pathlib.Path(path).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(UsageError, match=r"set.npz: damaged, or no file of np.savez \("):
        opened(path, **PARTS)
    pathlib.Path(path).write_bytes(whole[:-30])
    with pytest.raises(UsageError, match=r"set.npz: damaged, or no file of np.savez \(BadZipFile"):
        opened(path, **PARTS)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": IMAGES, "y": LABELS[:5]}, r"arrays x \[6, 4, 5\], y \[5\]; wanted two or more of one length"),
        ({"x": IMAGES, "y": LABELS / 2}, "a floating-point number is not a class number: if the values of 'y'|float64"),
        ({"x": IMAGES, "y": np.eye(3)[LABELS]}, r"label \(column 'y'\): float64 \[3\]; wanted one class number per"),
        ({"x": np.zeros((6, 3, 8, 8)), "y": LABELS}, r"channels first; .*; store np.moveaxis\(x, 1, -1\)"),
        ({"x": IMAGES, "y": np.full(6, -1)}, "no value is a class number; wanted integers from 0; is the set labelled"),
        ({"x": IMAGES, "y": np.array(["a", ""] * 3)}, "some texts are empty; wanted the name of a class in every"),
        (
            {"x_train": IMAGES, "y_train": LABELS, "x_val": IMAGES[:, :3], "y_val": LABELS},
            r"'x' is uint8 \[4, 5\] in one split and uint8 \[3, 5\] in another",
        ),
    ],
)
def test_what_is_wrong_is_told_with_what_to_write(tmp_path, arrays, said):
    test = "val" if "x_val" in arrays else "train[4:]"
    with pytest.raises(UsageError, match=said):
        opened(written(tmp_path, **arrays), test_split=test)


def test_a_missing_file_and_a_missing_split_are_told(tmp_path):
    with pytest.raises(UsageError, match="there is no file .*none.npz; wanted a file that np.savez wrote"):
        opened(str(tmp_path / "none.npz"))
    with pytest.raises(UsageError, match="has only the split train \\(6 examples\\), not 'test'; write --data.train_s"):
        opened(written(tmp_path, x=IMAGES, y=LABELS))
