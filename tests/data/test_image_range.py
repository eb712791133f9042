"""Images of more than 8 bits from every source that decodes files, as batches."""

import io

import numpy as np
import pytest
from PIL import Image as Pillow

from mpjax.config import Data, PythonObject, check_data
from mpjax.data import Image, eval_batches, in_range, open_source, train_batches
from mpjax.data.images import EIGHT, SIXTEEN, Depth, headers
from mpjax.errors import UsageError


def picture(value, dtype, size=4):
    return Pillow.fromarray(np.full((size, size), value, dtype))


KINDS = {
    # of files: how they end, the dtype and value of each, and what a batch has
    "L": ("png", np.uint8, 30, np.uint8, 30),
    "I;16": ("png", np.uint16, 300, np.float32, 300 / 65535),
    "I;16 tiff": ("tif", np.uint16, 300, np.float32, 300 / 65535),
    "F": ("tif", np.float32, 0.5, np.float32, 0.5),
}


def folder(tmp_path, ending, values, dtype):
    for index, value in enumerate(values):
        path = tmp_path / "train" / "ab"[index % 2] / f"{index}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(value, dtype).save(path)
    return f"folder:{tmp_path}"


def hugging_face(tmp_path, ending, values, dtype):
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    folder(tmp_path / "images", ending, values, dtype)
    return f"hf:imagefolder:{tmp_path / 'images'}"


def own(tmp_path, ending, values, dtype):
    del tmp_path

    def encoded(value):
        buffer = io.BytesIO()
        picture(value, dtype).save(buffer, {"png": "PNG", "tif": "TIFF"}[ending])
        return buffer.getvalue()

    rows = [{"image": encoded(value), "label": index % 2} for index, value in enumerate(values)]
    return PythonObject(lambda: {"train": rows})


SOURCES = {"folder": folder, "hf": hugging_face, "own": own}
SPLITS = {"train_split": "train[:4]", "test_split": "train[4:]", "num_classes": 2}


def batches(name, tmp_path, **settings):
    """Returns the pixels of both splits."""
    config = Data(name=name, batch_size=4, eval_batch_size=2, workers=0, **{**SPLITS, **settings})
    source = open_source(config, tmp_path / "nowhere")
    train = next(iter(train_batches(source, config, 0).from_position(0)))["image"]
    return source, train, next(iter(eval_batches(source, config)))["image"]


READ = {
    "as stored": {},
    "streamed": {"in_memory_mb": 0},
    "resized": {"image_size": 2},
    "interpolated": {"image_size": 2, "antialias": False},
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
def test_a_batch_has_the_numbers_that_were_stored(made, kind, read, tmp_path):
    if not read.get("antialias", True):
        pytest.importorskip("cv2")
    ending, stored, value, dtype, wanted = kind
    source, *found = batches(made(tmp_path, ending, [value] * 6, stored), tmp_path, **read)
    for pixels in found:
        assert pixels.dtype == dtype
        np.testing.assert_allclose(pixels, wanted, rtol=1e-6)
    assert len(source.notes) == (dtype == np.float32)


def test_so_has_one_of_tensorflow_datasets(tiny_sets):
    config = Data(name="tiny_xray", batch_size=4)
    source = open_source(config, tiny_sets)
    pixels = next(iter(train_batches(source, config, 0).from_position(0)))["image"]
    np.testing.assert_allclose(pixels, 300 / 65535, rtol=1e-6)
    assert len(source.notes) == 1


@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
def test_the_range_is_the_users_and_it_is_told(made, tmp_path):
    name = made(tmp_path, "png", [300] * 6, np.uint16)
    source, train, test = batches(name, tmp_path)
    assert train[0, 0, 0, 0] == test[0, 0, 0, 0] == np.float32(300 / 65535)
    assert len(source.notes) == 1
    assert source.notes[0].endswith(
        "image: 16-bit grayscale, 0 is read as 0 and 65535 as 1; for another range write --data.range LOW HIGH"
    )
    source, train, test = batches(name, tmp_path, range=(200, 400))
    assert train[0, 0, 0, 0] == test[0, 0, 0, 0] == 0.5
    assert source.notes[0].endswith("image: 16-bit grayscale, 200 is read as 0 and 400 as 1")


@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize("odd", [np.uint16, np.float32, np.uint8])
@pytest.mark.parametrize("usual", [np.uint16, np.uint8])
def test_one_file_of_another_kind_is_named_though_no_sample_has_it(usual, odd, read, tmp_path, monkeypatch):
    if usual == odd:
        return
    if not read.get("antialias", True):
        pytest.importorskip("cv2")
    monkeypatch.setattr(headers, "SAMPLE", 2)
    name = folder(tmp_path, "tif", [30] * 6, usual)
    for index in range(6):  # each in turn: two of them are looked at, the others are not
        path = tmp_path / "train" / "ab"[index % 2] / f"{index}.tif"
        stored = path.read_bytes()
        picture(1, odd).save(path)
        with pytest.raises(UsageError, match=rf"{path}.*; wanted one kind in a set: convert the file"):
            batches(name, tmp_path, **read)
        path.write_bytes(stored)


def test_a_colour_image_among_grayscale_ones_is_named(tmp_path, monkeypatch):
    name = folder(tmp_path, "png", [30] * 6, np.uint8)
    monkeypatch.setattr(headers, "SAMPLE", 1)
    first = open_source(Data(name=name, **SPLITS), tmp_path).train[0]["image"].path
    path = next(str(path) for path in tmp_path.rglob("*.png") if str(path) != first)
    Pillow.new("RGB", (4, 4), (200, 30, 30)).save(path)
    with pytest.raises(UsageError, match=rf"{path}: a colour image \(Pillow's mode RGB\); the set is grayscale"):
        batches(name, tmp_path)


def test_masks_of_16_bits_are_never_scaled(tmp_path):
    for index in range(6):
        for kind, value, dtype in (("images", 30, np.uint8), ("masks", 1000 * (index % 2), np.uint16)):
            path = tmp_path / kind / f"{index}.png"
            path.parent.mkdir(exist_ok=True)
            picture(value, dtype).save(path)
    config = Data(
        name=f"folder:{tmp_path}", batch_size=4, mask_values=(0, 1000), train_split="train", test_split="train"
    )
    masks = next(iter(train_batches(open_source(config, tmp_path, "segmentation"), config, 0).from_position(0)))["mask"]
    assert masks.dtype == np.int32
    assert set(masks.flat) == {0, 1}


def test_nor_are_those_of_a_task_of_ones_own(tmp_path):
    buffer = io.BytesIO()
    picture(1000, np.uint16).save(buffer, "PNG")
    rows = [{"image": np.zeros((4, 4, 1), np.uint8), "mask": buffer.getvalue()}]
    source = open_source(Data(name=PythonObject(lambda: (rows, rows))), tmp_path, "own")
    assert set(source.train[0]["mask"].flat) == {1000}


SEEN = "def f(example):\n    assert example['image'].max() < 0.01, example['image'].max()\n    return example\n"


def test_a_function_is_given_fractions(tmp_path):
    (tmp_path / "mine.py").write_text(SEEN)
    name = folder(tmp_path / "data", "png", [300] * 6, np.uint16)
    source, train, _ = batches(name, tmp_path, preprocess=f"{tmp_path}/mine.py:f")
    assert train[0, 0, 0, 0] == np.float32(300 / 65535)
    assert len(source.notes) == 1


THIRTYTWO = Image((4, 4, 1), depth=Depth("signed 32-bit grayscale", None))


def test_32_bits_need_a_range():
    with pytest.raises(UsageError, match=r"'x': image: signed 32-bit grayscale, whose range .*write --data.range LOW"):
        in_range({"image": THIRTYTWO}, Data(), "x")
    columns, notes = in_range({"image": THIRTYTWO}, Data(range=(0, 4095)), "x")
    assert columns["image"].depth.bounds == (0, 4095)
    assert notes == ("'x': image: signed 32-bit grayscale, 0 is read as 0 and 4095 as 1",)


def test_a_range_for_nothing_is_refused(tmp_path):
    eight = Image((4, 4, 1), depth=EIGHT)
    with pytest.raises(UsageError, match="--data.range 0 4095: 'x' has no image files of more than 8 bits"):
        in_range({"image": eight}, Data(range=(0, 4095)), "x")
    with pytest.raises(UsageError, match="leave out --data.range"):
        open_source(Data(name="synthetic:4x4x1:2", range=(0, 4095)), tmp_path)
    assert in_range({"image": eight}, Data(), "x") == ({"image": eight}, ())
    assert in_range({"image": Image((4, 4, 1), depth=SIXTEEN)}, Data(), "x")[1]


@pytest.mark.parametrize("bounds", [(1.0,), (1.0, 1.0), (0.0, float("inf")), (0.0, 1.0, 2.0)])
def test_a_range_is_two_numbers(bounds):
    with pytest.raises(UsageError, match="data.range is .*wanted two different numbers"):
        check_data(Data(range=bounds))
