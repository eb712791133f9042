"""Data of the user's own: arrays, indexed objects, iterables, and what they must not be taken for."""

import io

import numpy as np
import pytest
from PIL import Image as Pillow

from mpjax.config import Data, PythonObject
from mpjax.data import Image, Label, open_source, reader
from mpjax.data.sources import open_own
from mpjax.errors import UsageError


IMAGES = np.arange(6 * 4 * 4 * 3, dtype=np.uint8).reshape(6, 4, 4, 3)
LABELS = np.array([0, 1, 2, 0, 1, 2])
ARRAYS = {"image": IMAGES, "label": LABELS}
ROWS = [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)]


class Indexed:
    """As a torch Dataset or a grain MapDataset."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return ROWS[index]


class Tensor:
    """As torch's: it converts to NumPy."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


def opened(found, task="classification", **settings):
    config = Data(**{"name": PythonObject(lambda: found), "num_classes": 3, **settings})
    return open_source(config, None, task)


def labels(examples):
    return [int(example["label"]) for example in examples.__getitems__(range(len(examples)))]


@pytest.mark.parametrize(
    "split",
    [
        ARRAYS,
        Indexed(),
        ROWS,
        lambda: iter(ROWS),
        [{name: Tensor(value) for name, value in row.items()} for row in ROWS],
    ],
    ids=["arrays", "indexed", "list", "generator", "tensors"],
)
def test_every_form_gives_the_same_examples(split):
    source = opened((split, split))
    assert source.fields == {"image": Image((4, 4, 3)), "label": Label(3)}
    assert labels(source.train) == [0, 1, 2, 0, 1, 2]
    assert np.array_equal(source.test[4]["image"], IMAGES[4])


def test_splits_are_named_and_cut_as_those_of_other_sets():
    source = opened({"train": ARRAYS, "rest": Indexed()}, train_split="train[:4]", test_split="train[4:]+rest[:2]")
    assert labels(source.train) == [0, 1, 2, 0]
    assert labels(source.test) == [1, 2, 0, 1]
    assert len(source.test) == 4
    with pytest.raises(IndexError):
        source.train[-1]  # the last example of the split is not in the part


def test_the_first_part_of_a_sum_may_be_empty():
    empty = {name: values[:0] for name, values in ARRAYS.items()}
    source = opened({"fold": empty, "train": ARRAYS}, train_split="fold+train", test_split="train")
    assert labels(source.train) == [0, 1, 2, 0, 1, 2]


def test_a_tuple_has_numbered_columns():
    pairs = [(image, label) for image, label in zip(IMAGES, LABELS, strict=True)]
    source = opened((pairs, pairs), columns={"image": "0", "label": "1"})
    assert labels(source.train) == [0, 1, 2, 0, 1, 2]


def test_encoded_images_are_images():
    stored = io.BytesIO()
    Pillow.fromarray(IMAGES[0]).save(stored, "PNG")
    rows = [{"image": stored.getvalue(), "label": 1}]
    assert opened((rows, rows)).fields["image"] == Image((4, 4, 3))


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_bytes_and_texts_keep_their_zeros_at_the_end(kind):
    """An array of NumPy's dtype S or U strips them."""
    rows = {"image": kind([b"a\0\0", b"abcde\0"]), "text": kind(["a\0", "bc"])}
    table = open_own(Data(name=PythonObject(lambda: (rows, rows))))
    train, _ = table.open(("image", "text"))
    assert train[0] == {"image": b"a\0\0", "text": "a\0"}
    assert train.__getitems__([1])[0] == {"image": b"abcde\0", "text": "bc"}


def test_images_of_several_sizes_vary():
    rows = [{"image": np.zeros((size, 4, 3), np.uint8), "label": 0} for size in (4, 5, 6) for _ in range(8)]
    assert opened((rows, rows)).fields["image"] == Image((None, None, 3))


def test_few_images_of_several_sizes_vary_too():
    rows = [{"image": np.zeros((size, 4, 3), np.uint8), "label": 0} for size in (4, 5)]
    assert opened((rows, rows)).fields["image"] == Image((None, None, 3))


def test_channels_first_are_not_taken_for_rows():
    rows = {"image": np.zeros((6, 3, 8, 8), np.float32), "label": LABELS}
    with pytest.raises(
        UsageError, match=r"image has shape \(3, 8, 8\), with channels first.*np.moveaxis\(image, 0, -1\)"
    ):
        opened((rows, rows))


@pytest.mark.parametrize("kind", [lambda *row: dict(zip(("image", "label"), row, strict=True)), lambda *row: [*row]])
def test_an_iterable_is_read_up_to_the_limit_of_memory(kind):
    rows = (kind(np.zeros((100, 100, 3), np.float32), 0) for _ in range(100))
    with pytest.raises(UsageError, match="split 'train': an iterable is read into memory, and 9 examples are over"):
        opened((rows, ROWS), in_memory_mb=1)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ARRAYS["image"], "returned a ndarray; wanted"),
        ((ROWS, ROWS, ROWS), "returned a tuple of 3; wanted"),
        ({}, "returned a dict of 0; wanted"),
        ((ROWS, 3), "split 'test': a int; wanted"),
        ((ROWS, {"image": IMAGES, "label": LABELS[:5]}), "split 'test': arrays of lengths {'image': 6, 'label': 5}"),
        ((iter(()), ROWS), "split 'train': the iterable has no examples"),
        ((["text"], ROWS), "split 'train': example 0 is str; wanted a dict of fields"),
        (ARRAYS, r"returned one dict of image, label, which are columns and not splits; .* \(train, test\)"),
        ({"image": [[1.0]], "label": [0]}, "returned one dict of image, label, which are columns"),
    ],
)
def test_anything_else_is_an_error_that_says_what_is_wanted(found, said):
    with pytest.raises(UsageError, match=said):
        opened(found)


def test_an_example_without_a_column_is_an_error():
    rows = [*ROWS[:1], {"image": IMAGES[0]}]
    source = opened((rows, rows))
    with pytest.raises(UsageError, match="an example has no 'label', which the first one has; it has image"):
        source.train.__getitems__([1])


def test_a_source_is_taken_as_it_is():
    source = opened((ROWS, ROWS))
    assert opened(source) is source


def test_a_file_that_a_setting_names(tmp_path):
    (tmp_path / "mine.py").write_text("rows = [{'image': [[[1]]], 'label': 0}]\ndef both(): return rows, rows\n")
    with pytest.raises(UsageError, match="has no bot; did you mean both"):
        open_source(Data(name=f"{tmp_path}/mine.py:bot"), tmp_path)


class Broken(Indexed):
    def __getitem__(self, index):
        if index == 4:
            raise OSError("disk")
        return ROWS[index]


def broken_rows():
    yield from ROWS[:2]
    raise OSError("disk")


def no_source():
    raise OSError("disk")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (no_source, r"--data.name python:no_source failed: OSError: disk \(test_own.py, line \d+\)"),
        (lambda: (Broken(), ROWS), r"split 'train': example 4 failed: OSError: disk \(test_own.py, line \d+\)"),
        (lambda: (broken_rows, ROWS), r"split 'train' failed: OSError: disk \(test_own.py, line \d+\)"),
        (lambda size: (ROWS, ROWS), r"takes \(size\): it is called with \(\)"),
    ],
)
def test_a_source_that_fails_is_named_with_its_line(source, said):
    def read():
        train = open_source(Data(name=PythonObject(source), num_classes=3), None).train
        train.__getitems__(range(len(train)))

    with pytest.raises(UsageError, match=said):
        read()


@pytest.mark.parametrize("kind", ["arrays", "rows", "preprocess"])
def test_what_is_under_a_mask_is_not_read(kind, tmp_path):
    images = np.ma.masked_less(np.zeros((4, 2, 2, 1), np.float32), 1)
    whole = {"image": images, "label": np.zeros(4, int)}
    split = whole if kind == "arrays" else [{"image": image, "label": 0} for image in images]
    if kind == "preprocess":
        split = {**whole, "image": images.filled(0)}
    (tmp_path / "f.py").write_text(
        "import numpy as np\ndef f(example):\n    return example | {'image': np.ma.masked_less(example['image'], 1)}\n"
    )
    preprocess = f"{tmp_path}/f.py:f" if kind == "preprocess" else ""
    config = Data(name=PythonObject(lambda: (split, split)), num_classes=2, preprocess=preprocess)
    with pytest.raises(UsageError, match="image.*: a masked array, of which NumPy would read what is under the mask"):
        reader(open_source(config, tmp_path), config, training=True)(open_source(config, tmp_path).train[0])
