import json
import re
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mpjax.config import Data
from mpjax.data import Image, Mask, Other, as_task, labelled_images
from mpjax.data.sources import column_of, prepared_names
from mpjax.data.sources import open_prepared as open_table
from mpjax.errors import UsageError


def open_prepared(config, data_dir):
    return as_task(open_table(config, data_dir), "classification", config)


@pytest.fixture
def own_dir(tiny_sets, tmp_path):
    return shutil.copytree(tiny_sets, tmp_path / "data")


def change_info(data_dir, **fields):
    info = data_dir / "tiny_tensor/1.0.0/dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | fields))


def test_reads_images_and_labels_and_nothing_else(tiny_sets):
    source = open_prepared(Data(name="tiny_tensor"), tiny_sets)
    assert (source.fields, source.varies) == (labelled_images(3, (4, 4, 3)), False)
    assert (len(source.train), len(source.test)) == (10, 3)
    assert set(source.train[7]) == {"image", "label"}
    assert source.train[7]["label"] == 1
    np.testing.assert_array_equal(source.train[7]["image"], np.full((4, 4, 3), 7, np.uint8))
    assert [example["label"] for example in source.train.__getitems__([5, 4, 3])] == [2, 1, 0]


def test_images_stay_encoded(tiny_sets):
    source = open_prepared(Data(name="tiny_jpeg"), tiny_sets)
    assert (source.fields["image"].shape, source.varies) == ((None, None, 3), True)
    assert source.train[0]["image"].startswith(b"\xff\xd8\xff")


def test_parts_of_splits(tiny_sets):
    source = open_prepared(Data(name="tiny_tensor", train_split="train[:70%]", test_split="train[70%:]"), tiny_sets)
    assert (len(source.train), len(source.test)) == (7, 3)
    assert source.test[0]["image"][0, 0, 0] == 7


@pytest.mark.parametrize("split", ["train[5:3]", "train+train[5:3]", "train[5:3]+train[2:4]"])
def test_a_reversed_part_is_named_and_takes_no_examples_from_the_others(tiny_sets, split):
    with pytest.raises(UsageError, match=r"^split 'train\[5:3\]' starts at"):
        open_prepared(Data(name="tiny_tensor", train_split=split), tiny_sets)


@pytest.mark.parametrize(("made", "wanted"), [("mine.csv", "hf"), ("mine/cat/", "folder"), ("mine/a.csv", "hf")])
def test_the_name_of_a_file_or_folder_lacks_its_kind(tiny_sets, tmp_path, monkeypatch, made, wanted):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / made
    path.mkdir(parents=True) if made.endswith("/") else path.parent.mkdir(exist_ok=True)
    if not made.endswith("/"):
        path.write_text("")
    name = made.split("/")[0]
    with pytest.raises(UsageError, match=f"there is a (file|folder) {name}; write --data.name {wanted}:{name}$"):
        open_prepared(Data(name=name), tiny_sets)


@pytest.mark.parametrize(("split", "says"), [("validation", "Unknown split"), ("train[:", "Unrecognized split format")])
def test_a_split_it_does_not_have(tiny_sets, split, says):
    with pytest.raises(UsageError, match=rf"(?s){says}.*it has train \(10 examples\), test \(3 examples\)"):
        open_prepared(Data(name="tiny_tensor", train_split=split), tiny_sets)


def test_an_empty_part(tiny_sets):
    with pytest.raises(UsageError, match=re.escape("split 'train[:0]' is empty")):
        open_prepared(Data(name="tiny_tensor", train_split="train[:0]"), tiny_sets)


@pytest.mark.parametrize(
    ("name", "opened"), [("tiny_tensor", "10.0.0"), ("tiny_tensor/9.0.0", "9.0.0"), ("tiny_tensor/1.0.0", "1.0.0")]
)
def test_newest_version_unless_one_is_named(own_dir, name, opened):
    for version in ("9.0.0", "10.0.0"):
        shutil.copytree(own_dir / "tiny_tensor/1.0.0", own_dir / "tiny_tensor" / version)
    assert prepared_names(own_dir)[3:6] == ["tiny_tensor/1.0.0", "tiny_tensor/9.0.0", "tiny_tensor/10.0.0"]
    for features in own_dir.glob("tiny_tensor/*/features.json"):
        if features.parent.name != opened:
            features.unlink()  # cannot be opened now
    assert len(open_prepared(Data(name=name), own_dir).train) == 10


def test_a_set_with_configs_is_named_with_one(own_dir):
    (own_dir / "tiny").mkdir()
    shutil.move(own_dir / "tiny_tensor", own_dir / "tiny/tensor")
    assert len(open_prepared(Data(name="tiny/tensor"), own_dir).train) == 10
    with pytest.raises(UsageError, match=r"did you mean tiny/tensor\?"):
        open_prepared(Data(name="tiny"), own_dir)


def test_missing_says_where_it_looked_what_is_there_and_what_to_write(tiny_sets):
    with pytest.raises(UsageError) as raised:
        open_prepared(Data(name="tiny_tensr"), tiny_sets)
    message = str(raised.value)
    assert "data set 'tiny_tensr' is not prepared" in message
    assert f"looked for {tiny_sets}/tiny_tensr/VERSION/dataset_info.json" in message
    assert "did you mean tiny_tensor" in message
    there = (f"tiny_{name}/1.0.0" for name in ("jpeg", "pets", "sst2", "tensor", "text", "xray"))
    assert f"prepared there: {', '.join(there)}; always available: digits, digits_canvas, docstrings" in message
    assert "tfds build tiny_tensr --file_format=array_record --data_dir DIR" in message


def test_missing_folder(tmp_path):
    with pytest.raises(UsageError, match="prepared there: none"):
        open_prepared(Data(name="cifar10"), tmp_path / "nowhere")


def test_a_folder_left_by_a_killed_process_is_not_a_set(own_dir):
    (own_dir / "tiny_tensor/1.0.0").rename(own_dir / "tiny_tensor/incomplete.ABCDEF_1.0.0")
    with pytest.raises(UsageError, match="'tiny_tensor' is not prepared"):
        open_prepared(Data(name="tiny_tensor"), own_dir)


@pytest.mark.parametrize("stored", ["tfrecord", "parquet"])
def test_a_format_that_cannot_be_read_without_tensorflow(own_dir, stored):
    change_info(own_dir, fileFormat=stored)
    with pytest.raises(UsageError, match=rf"(?s)stored as {stored}; wanted array_record.*tfds convert_format "):
        open_prepared(Data(name="tiny_tensor"), own_dir)


def test_a_set_that_names_a_class_of_another_package_imports_nothing(own_dir, monkeypatch):
    features = own_dir / "tiny_tensor/1.0.0/features.json"
    text = features.read_text()
    (own_dir / "evil_of_tfds.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(own_dir)
    tiny = Data(name="tiny_tensor")
    for name in ("evil_of_tfds.Tensor", "\\u0065vil_of_tfds.Tensor"):
        features.write_text(text.replace("tensorflow_datasets.core.features.tensor_feature.Tensor", name))
        with pytest.raises(UsageError, match=r"features.json names the class 'evil_of_tfds.*alone"):
            open_prepared(tiny, own_dir)
    features.write_text(text[:50])
    with pytest.raises(UsageError, match=r"features.json is damaged .*, and copy or prepare it again$"):
        open_prepared(tiny, own_dir)


def test_files_that_were_not_copied(own_dir):
    next((own_dir / "tiny_tensor/1.0.0").glob("*train*")).unlink()
    with pytest.raises(UsageError, match=r"files of split 'train' are missing: tiny_tensor-train.array_record"):
        open_prepared(Data(name="tiny_tensor"), own_dir)


def test_no_image(tiny_sets):
    with pytest.raises(UsageError, match=r"no column that could be the image.*its columns are .*sentence: Text"):
        open_prepared(Data(name="tiny_text"), tiny_sets)


@pytest.mark.parametrize(
    ("shape", "dtype", "column"),
    [
        ((8, 9), np.uint8, Mask((8, 9), 0)),
        ((None, None), np.int32, Mask((None, None), 0)),
        ((8, 9, 1), np.uint8, Image((8, 9, 1))),
        ((8, 9), np.float32, 2),
        ((5,), np.int64, 1),
        ((), np.int64, 0),
    ],
)
def test_what_a_tensor_holds(shape, dtype, column):
    feature = tfds.features.Tensor(shape=shape, dtype=dtype)
    assert column_of(feature) == (Other(repr(feature), rank=column) if isinstance(column, int) else column)
