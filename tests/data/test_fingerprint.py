"""Changes of the data of a run against every source that can notice them, in memory and streamed."""

import itertools
import json

import numpy as np
import pytest
from PIL import Image as Pillow

from mpjax.config import Data, PythonObject
from mpjax.data import (
    WHOLE,
    Image,
    Label,
    Share,
    Source,
    differences,
    eval_batches,
    fingerprint_of,
    open_source,
    train_batches,
)
from mpjax.data import fingerprint as module


def split(count, first):
    """Images of different values, and labels 0, 0, 1, 1, ..."""
    images = np.arange(first, first + count, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 1), np.uint8)
    return {"image": images, "label": np.arange(count) // 2 % 2}


def data():
    return {"train": split(12, 10), "test": split(6, 100)}


def one_pixel(name, place=3):
    def change(found):
        found[name]["image"][place, 2, 1, 0] += 1

    return change


def permuted_labels(name):
    def change(found):
        found[name]["label"][[1, 2]] = found[name]["label"][[2, 1]]

    return change


def reordered(found):
    found["train"] = {name: np.concatenate([values[5:], values[:5]]) for name, values in found["train"].items()}


def fewer(name):
    def change(found):
        found[name] = {field: values[:-1] for field, values in found[name].items()}

    return change


def another_dtype(found):
    for part in found.values():
        part["image"] = part["image"].astype(np.uint16)


def another_shape(found):
    for part in found.values():
        part["image"] = np.repeat(part["image"], 2, axis=1)


CHANGES = {
    # what is changed, and what is said of it
    "pixels": (one_pixel("train"), "train: image has other values"),
    "labels": (permuted_labels("train"), "train: label has the same values at other examples"),
    "order": (reordered, "train: the same examples in another order"),
    "count": (fewer("train"), "train: 11 examples, before 12"),
    "dtype": (another_dtype, "train: image is float32 [4, 4, 1], before uint8 [4, 4, 1]"),
    "shape": (another_shape, "train: image is uint8 [8, 4, 1], before uint8 [4, 4, 1]"),
    "test pixels": (one_pixel("test"), "test: image has other values"),
    "test labels": (permuted_labels("test"), "test: label has the same values at other examples"),
    "test count": (fewer("test"), "test: 5 examples, before 6"),
}


def folder(found, tmp_path):
    for name, part in found.items():
        # The hash of a file's name says where it stands: the n-th example gets the n-th of these names.
        names = [f"{number}.png" for number in range(len(part["label"]))]
        for file, image, label in zip(names, part["image"], part["label"], strict=True):
            path = tmp_path / name / "ab"[label] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            Pillow.fromarray(image[..., 0]).save(path)
    return f"folder:{tmp_path}"


def hugging_face(found, tmp_path):
    datasets = pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    kinds = {np.dtype(np.uint8): "uint8", np.dtype(np.uint16): "float32"}
    for name, part in found.items():
        images = part["image"]
        features = datasets.Features(
            {
                "image": datasets.Array3D(shape=images.shape[1:], dtype=kinds[images.dtype]),
                "label": datasets.ClassLabel(num_classes=2),
            }
        )
        rows = {"image": list(images), "label": part["label"].tolist()}
        tmp_path.mkdir(exist_ok=True)
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    return f"hf:{tmp_path}"


def floats(found):
    deep = {
        name: {**part, "image": part["image"].astype(np.float32)}
        for name, part in found.items()
        if part["image"].dtype == np.uint16
    }
    return {**found, **deep}


def arrays(found, tmp_path):
    del tmp_path
    return PythonObject(lambda: floats(found))


def rows(found, tmp_path):
    del tmp_path
    listed = {
        name: [dict(zip(part, values, strict=True)) for values in zip(*part.values(), strict=True)]
        for name, part in floats(found).items()
    }
    return PythonObject(lambda: listed)


SOURCES = {"folder": folder, "hf": hugging_face, "arrays": arrays, "rows": rows}
READ = {"in memory": {}, "streamed": {"in_memory_mb": 0}}


def of(name, tmp_path, share=WHOLE, **settings):
    config = Data(name=name, num_classes=2, batch_size=2, eval_batch_size=2, **settings)
    source = open_source(config, tmp_path / "nowhere")
    return of_source(source, config, share)


def of_source(source, config, share=WHOLE):
    found = fingerprint_of(source, config, train_batches(source, config, 0, share), eval_batches(source, config, share))
    return json.loads(json.dumps(found))  # as a checkpoint keeps it


@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_other_data_is_told(change, said, made, read, tmp_path):
    if (made, change) == (folder, reordered):
        pytest.skip("the names of files give the order of a folder: see the next test")
    before, after = data(), data()
    change(after)
    was, now = (of(made(part, tmp_path / name), tmp_path, **read) for name, part in [("a", before), ("b", after)])
    found = differences(was, now)
    if made is folder and ": label" in said:  # the name of the class is in the path, which gives the order, too
        said = said.partition(":")[0]
    assert any(line.startswith(said) for line in found), found
    assert change in (another_dtype, another_shape) or {line.split(":")[0] for line in found} == {said.split(":")[0]}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_renamed_files_of_a_folder_are_another_order(read, tmp_path):
    name = folder(data(), tmp_path)
    before = of(name, tmp_path, **read)
    for path in tmp_path.glob("train/*/*.png"):
        path.rename(path.with_name(f"renamed{path.name}"))
    assert differences(before, of(name, tmp_path, **read)) == ["train: the same examples in another order"]


@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
def test_the_same_data_is_the_same_in_another_place_and_in_any_process(made, read, tmp_path):
    one = of(made(data(), tmp_path / "a"), tmp_path, **read)
    assert differences(one, of(made(data(), tmp_path / "b"), tmp_path, **read)) == []
    assert one == of(made(data(), tmp_path / "b"), tmp_path, share=Share(1, 2), **read)
    settings = {"workers": 0, "flip": True, "mean": (0.5,), "mixup": 0.2}
    assert differences(one, of(made(data(), tmp_path / "b"), tmp_path, **read, **settings)) == []


def test_in_memory_and_streamed_have_other_orders(tmp_path):
    name = arrays(data(), tmp_path)
    found = differences(of(name, tmp_path), of(name, tmp_path, in_memory_mb=0))
    assert found == [
        "train: streamed, before in memory, which has another order",
        "test: streamed, before in memory, which has another order",
    ]


def test_a_sample_of_a_large_stream(tmp_path, monkeypatch):
    """3 of 12 examples: the first, the middle and the last."""
    monkeypatch.setattr(module, "SAMPLE", 3)
    before = of(arrays(data(), tmp_path), tmp_path, in_memory_mb=0)
    for place, said in ((0, ["train: image has other values in 3 examples that were looked at"]), (3, [])):
        changed = data()
        one_pixel("train", place)(changed)
        assert differences(before, of(arrays(changed, tmp_path), tmp_path, in_memory_mb=0)) == said


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_what_a_function_draws_at_random_says_nothing_of_the_data(read, tmp_path):
    numbers = itertools.count()

    def drawn(example):
        return {**example, "image": example["image"] ^ np.uint8(next(numbers) % 251)}

    name, settings = arrays(data(), tmp_path), {"preprocess": PythonObject(drawn), **read}
    before = of(name, tmp_path, **settings)
    assert differences(before, of(name, tmp_path, **settings)) == []
    changed = data()
    permuted_labels("train")(changed)
    found = differences(before, of(arrays(changed, tmp_path), tmp_path, **settings))
    assert found == ["train: label has the same values at other examples"]


def test_a_mixture_counts_all_its_sets(tmp_path):
    one, two = (folder(data(), tmp_path / name) for name in "ab")
    config = Data(name=one, mix={two: 0.5}, batch_size=2, eval_batch_size=2)
    before = of_source(open_source(config, tmp_path), config)
    assert before["train"]["examples"] == 24
    changed = data()
    one_pixel("train")(changed)
    folder(changed, tmp_path / "b")
    now = of_source(open_source(config, tmp_path), config)
    assert differences(before, now) == ["train: image has other values"]


def test_a_checkpoint_of_before_has_none():
    image = {"image": np.zeros((4, 4, 1), np.uint8), "label": 0}
    source = Source("x", {"image": Image((4, 4, 1)), "label": Label(2)}, Listed([image] * 4), Listed([image] * 2))
    assert differences(None, of_source(source, Data(batch_size=2))) == []


class Listed(list):
    def __getitems__(self, numbers):
        return [self[number] for number in numbers]
