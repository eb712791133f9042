"""What a user gives to a model: found, read in order, in batches of one size."""

import numpy as np
import pytest
from PIL import Image as Pillow

from mpjax.config import Data
from mpjax.data import Inputs, Source, files_of, given_batches, given_images, given_split, labelled_images, takes_images
from mpjax.data.sources import synthetic_source
from mpjax.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    for name in ("b/2.png", "b/10.png", "a/1.png", ".hidden/x.png", "c/.y.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Pillow.fromarray(np.full((4, 4), len(name), np.uint8)).save(path)
    return tmp_path


def test_a_folder_is_all_its_files_by_name(folder):
    assert [path.removeprefix(f"{folder}/") for path in files_of(str(folder))] == ["a/1.png", "b/10.png", "b/2.png"]
    (folder / "a" / "metadata.csv").touch()  # the table of a folder's texts is no input
    assert len(files_of(str(folder))) == 3
    assert files_of(f"{folder}/a/1.png") == [f"{folder}/a/1.png"]
    assert files_of(f"{folder}/**/1*.png") == [f"{folder}/a/1.png", f"{folder}/b/10.png"]


def test_what_is_not_there_is_named(folder):
    (folder / "empty").mkdir()
    for given, says in [
        (f"{folder}/empty", "empty: the folder has no files"),
        (f"{folder}/x.png", "x.png: no such file or folder"),
        (f"{folder}/*.jpg", r"jpg: no file matches"),
    ]:
        with pytest.raises(UsageError, match=says):
            files_of(given)


def numbers(sizes, *, bad=()):
    """Inputs of several rows each; row values are the number of the input."""

    def rows(position):
        if position in bad:
            raise UsageError(f"{position} is bad")
        return {"x": np.full((sizes[position], 2), position, np.int32)}

    return Inputs([f"n{i}" for i in range(len(sizes))], list, rows)


def test_batches_have_one_size_and_keep_the_order_of_rows():
    found = list(given_batches(numbers([1, 3, 1, 2]), 3, workers=2, skip=None))
    assert [list(owners) for owners, _ in found] == [[0, 1, 1], [1, 2, 3], [3]]
    assert [batch["x"][:, 0].tolist() for _, batch in found] == [[0, 1, 1], [1, 2, 3], [3, 0, 0]]
    assert [batch["weight"].tolist() for _, batch in found] == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]


def test_a_bad_input_is_an_error_that_names_it_or_is_reported():
    with pytest.raises(UsageError, match="^n2: 2 is bad$"):
        list(given_batches(numbers([1] * 5, bad={2}), 2, workers=1, skip=None))
    said = []
    found = list(given_batches(numbers([1] * 5, bad={2}), 2, workers=1, skip=said.append))
    assert said == ["n2: 2 is bad"]
    assert [list(owners) for owners, _ in found] == [[0, 1], [3, 4]]


def test_a_file_that_cannot_be_opened_is_reported_too(folder):
    (folder / "a/0.png").symlink_to(folder / "gone.png")
    given = given_images([str(folder)], source_of(1), Data())
    with pytest.raises(UsageError, match="a/0.png.*; repair or remove the file$"):
        list(given_batches(given, 2, workers=1, skip=None))
    said = []
    found = list(given_batches(given, 2, workers=1, skip=said.append))
    missing = f"[Errno 2] No such file or directory: '{folder}/a/0.png'"
    assert said == [f"cannot be read: {missing}; repair or remove the file"]
    assert [list(owners) for owners, _ in found] == [[1, 2], [3]]


class Broken(list):
    """Examples of which the third cannot be read."""

    def __getitem__(self, index):
        if index == 2:
            raise UsageError("column 'image': no image")
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_an_example_of_a_split_that_cannot_be_read_is_reported_too():
    examples = Broken({"image": np.zeros((2, 2, 1), np.uint8), "label": 1} for _ in range(4))
    given = given_split(Source("set", labelled_images(3, (2, 2, 1)), [], examples), Data())
    said = []
    found = list(given_batches(given, 4, workers=1, skip=said.append))
    assert said == ["test[2]: column 'image': no image"]
    assert [list(owners) for owners, _ in found] == [[0, 1, 3]]


def test_inputs_of_another_dtype_are_refused():
    values = [np.zeros((1, 2), np.uint8), np.zeros((1, 2), np.float32)]
    given = Inputs(["a", "b"], list, lambda position: {"image": values[position]})
    with pytest.raises(UsageError, match="b: image is float32, that of the first input is uint8"):
        list(given_batches(given, 2, workers=1, skip=None))


def source_of(channels):
    return Source("set", labelled_images(10, (4, 4, channels)), train=[], test=[])


def trained_on_floats(test=()):
    example = {"image": np.full((4, 4, 1), 16, np.float32), "label": 1}
    return Source("set", labelled_images(10, (4, 4, 1)), train=[example], test=IndexedRows(test))


class IndexedRows(list):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_files_of_8_bits_are_not_given_to_a_model_of_unscaled_floats(folder):
    said = "a/1.png: image is uint8, that of the training set is float32: .* and write --split NAME$"
    given = given_images([str(folder)], trained_on_floats(), Data())
    with pytest.raises(UsageError, match=said):
        next(given_batches(given, 4, workers=1, skip=None))


def test_nor_is_a_split_of_8_bits():
    source = trained_on_floats([{"image": np.full((4, 4, 1), 16, np.uint8), "label": 1}])
    with pytest.raises(UsageError, match=r"test\[0\]: image is uint8, that of the training set is float32"):
        next(given_batches(given_split(source, Data()), 1, workers=1, skip=None))


def test_images_are_read_as_those_of_the_set(folder):
    given = given_images([str(folder)], source_of(3), Data())
    ((owners, batch),) = given_batches(given, 4, workers=1, skip=None)
    assert (list(owners), batch["image"].shape, set(batch)) == ([0, 1, 2], (4, 4, 4, 3), {"image", "weight"})
    assert batch["image"][:, 0, 0, 0].tolist() == [7, 8, 7, 0]


def test_colours_are_not_dropped_without_a_word(tmp_path):
    Pillow.new("RGB", (4, 4)).save(tmp_path / "a.png")
    given = given_images([str(tmp_path / "a.png")], source_of(1), Data())
    with pytest.raises(UsageError, match=r"a.png: a colour image \(Pillow's mode RGB\); the model takes grayscale"):
        given.to_arrays(given.names[0])


def test_files_that_are_no_images_or_of_another_size_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    Pillow.new("L", (5, 4)).save(tmp_path / "b.png")
    for name, says in [("a.txt", "a.txt: cannot be decoded: not an image"), ("b.png", r"b.png: .*wanted \[4, 4, 1\]")]:
        given = given_images([str(tmp_path / name)], source_of(1), Data())
        with pytest.raises(UsageError, match=says):
            list(given_batches(given, 1, workers=1, skip=None))


def test_a_split_keeps_its_labels():
    source = synthetic_source(10, (4, 4, 1), size=5)
    given = given_split(source, Data(test_split="test"))
    assert list(given.names)[-1] == "test[4]"
    ((_, batch),) = given_batches(given, 5, workers=1, skip=None)
    assert batch["label"].tolist() == [int(source.test[i]["label"]) for i in range(5)]
    assert takes_images(source)
