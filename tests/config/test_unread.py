"""A setting of the data that nothing would read is refused, so that nobody believes it changed the run."""

import numpy as np
import pytest

from mpjax.config import Data, PythonObject, check, load_config
from mpjax.data import Image, Label, Length, Source, Tokens, open_source, synthetic_source
from mpjax.errors import UsageError


VALUES = {
    "image_size": "8",
    "range": "0 4095",
    "mean": "0.5",
    "std": "0.5",
    "crop_padding": "4",
    "crop_edges": "reflect",
    "flip": "",
    "alternate_flips": "",
    "random_resized_crop": "0.5",
    "randaugment_ops": "2",
    "randaugment_magnitude": "4",
    "random_erasing": "0.2",
    "mixup": "0.2",
    "cutmix": "1",
    "length": "64",
    "mask_values": "0 255",
    "num_classes": "3",
    "drop": "a",
    "categories": "a",
    "missing": "a",
    "decimal": ",",
    "rows": "stored",
}
KINDS = {
    "images": (["image_size", "range"], ["language_modeling", "audio_classification", "embedding"]),
    "a field image": (
        [
            *("mean", "std", "crop_padding", "crop_edges", "flip", "alternate_flips", "random_resized_crop"),
            *("randaugment_ops", "randaugment_magnitude", "random_erasing", "mixup", "cutmix"),
        ],
        ["text_classification", "transcription", "preference"],
    ),
    "texts": (["length"], ["classification", "diffusion", "audio_classification"]),
    "masks": (["mask_values"], ["classification", "language_modeling", "image_text"]),
    "classes": (["num_classes"], ["language_modeling", "audio_classification", "image_text"]),
    "tables": (["drop", "categories", "missing", "decimal", "rows"], ["classification", "own", "regression"]),
}
"""The settings of each kind of data, and tasks without it."""
OF_ALL_DATA = {
    *("name", "mix", "data_dir", "train_split", "test_split", "columns", "preprocess", "augment", "batch_size"),
    *("eval_batch_size", "in_memory_mb", "on_device_mb", "workers"),
}
CHECKED_BESIDE_OTHERS = {"antialias", "header", "text_template", "targets", "ignore_index"} | {
    *("tokenizer", "features", "language", "documents"),
}


def test_each_setting_of_data_is_known_here():
    """A new one needs data that read it, or a place below."""
    read = [name for names, _ in KINDS.values() for name in names]
    assert sorted([*read, *OF_ALL_DATA, *CHECKED_BESIDE_OTHERS]) == sorted(Data.__dataclass_fields__)


@pytest.mark.parametrize(
    ("kind", "name", "task"),
    [(kind, name, task) for kind, (names, tasks) in KINDS.items() for name in names for task in tasks],
)
def test_a_setting_without_its_data_is_refused_by_name(kind, name, task):
    config = load_config(f"--task {task} --data.{name} {VALUES[name]}".split())
    with pytest.raises(UsageError, match=f"--data.{name}.* is for {kind}, .*leave it out"):
        check(config)


@pytest.mark.parametrize(
    "flags",
    [
        "--task language_modeling --data.crop_padding 0",
        "--task language_modeling --data.length 64 --data.tokenizer words",
        "--task segmentation --data.mask_values 0 255 --data.flip --data.image_size 8",
        "--task classification --data.tokenizer bytes --data.num_classes 3",
        "--task diffusion --model.name dit_s2 --data.flip --data.num_classes 10",
        "--task image_text --data.flip --data.length 16",
        "--task own --training.objective a.py:f --data.flip --data.length 16 --data.mask_values 0 255",
    ],
)
def test_and_one_with_its_data_is_taken(flags):
    check(load_config(flags.split()))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--data.tokenizer words", "--data.tokenizer words is for texts, which --task classification does not have"),
        ("--data.name tabular:a.csv --data.flip", "--data.flip is for a field image, which --data.name tabular:a.csv"),
        ("--data.name tabular:a.csv --data.tokenizer words", "--data.tokenizer words is for texts, which --data.name"),
        ("--data.name tabular:a.csv --data.length 9", "--data.length 9 is for texts, which --data.name tabular:a.csv"),
        ("--data.randaugment_magnitude 4", "without --data.randaugment_ops, which is 0: no operation is applied"),
    ],
)
def test_texts_tables_and_strengths(flags, said):
    with pytest.raises(UsageError, match=said):
        check(load_config(flags.split()))


ROWS = {"text": ["a", "b"], "target": np.array([1, 2], np.float32)}
IMAGES = {"photo": np.zeros((2, 4, 4, 1), np.uint8), "label": np.zeros(2, int)}


@pytest.mark.parametrize(
    ("rows", "task", "settings", "said"),
    [
        (ROWS, "regression", {"flip": True}, "--data.flip is for a field image, which the examples of .* do not have"),
        (ROWS, "regression", {"num_classes": 3}, "--data.num_classes 3 is for classes"),
        (ROWS, "regression", {"mean": (0.5, 0.4)}, "--data.mean 0.5 0.4 is for a field image"),
        (ROWS, "regression", {"mixup": 0.5}, "--data.mixup 0.5 is for a field image"),
        (IMAGES, "own", {"tokenizer": "words"}, "--data.tokenizer words is for texts"),
        (IMAGES, "own", {"mixup": 0.5}, "--data.mixup 0.5 is for a field image"),
        (IMAGES, "own", {"length": 9}, "--data.length 9 is for texts"),
        (IMAGES, "own", {"mask_values": (0, 255)}, "--data.mask_values 0 255 is for masks"),
    ],
)
def test_what_only_open_data_tell(rows, task, settings, said):
    examples = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    config = Data(name=PythonObject(lambda: (examples, examples)), **settings)
    with pytest.raises(UsageError, match=said):
        open_source(config, None, task)


SOURCE = Source("mine", {"image": Image((2, 2, 1)), "label": Label(3)}, [], [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train_split": "train[:9]"}, r"--data.train_split train\[:9\]: .* has the splits train and test alone"),
        ({"test_split": "rest"}, "--data.test_split rest: .* has the splits train and test alone"),
        ({"preprocess": "a.py:f"}, "--data.preprocess a.py:f: .* returns a Source"),
        ({"columns": {"image": "photo"}}, "--data.columns image photo: .* returns a Source"),
        ({"num_classes": 4}, "--data.num_classes 4: .* returns a Source, whose label has 3 classes; write one number"),
    ],
)
def test_a_source_is_read_as_it_is(settings, said):
    with pytest.raises(UsageError, match=said):
        open_source(Data(name=PythonObject(lambda: SOURCE), **settings), None)
    assert open_source(Data(name=PythonObject(lambda: SOURCE), num_classes=3, flip=True), None) is SOURCE


TOKENS = {"tokens": Tokens(16, 259), "length": Length(16)}


def test_a_source_of_tokens_has_its_length():
    texts = Source("mine", {**TOKENS, "label": Label(2)}, [], [])
    blocks = Source("mine", {"tokens": Tokens(17, 259)}, [], [])
    for source, task in ((texts, "text_classification"), (blocks, "language_modeling")):
        open_source(Data(name=PythonObject(lambda source=source: source), length=16), None, task)
        with pytest.raises(UsageError, match="--data.length 17: .* whose rows have 16 tokens; write one"):
            open_source(Data(name=PythonObject(lambda source=source: source), length=17), None, task)


@pytest.mark.parametrize("name", ["synthetic:4x4x1:3", PythonObject(lambda: synthetic_source(3, (4, 4, 1), 4))])
def test_the_test_split_of_a_set_of_two_splits_is_the_one_that_is_asked_for(name):
    kinds = {split: open_source(Data(name=name, test_split=split), None) for split in ("train", "test")}
    assert np.array_equal(kinds["train"].test[0]["image"], kinds["test"].train[0]["image"])
    assert not np.array_equal(kinds["test"].test[0]["image"], kinds["test"].train[0]["image"])
    with pytest.raises(UsageError, match="--data.test_split rubbish: .* has the splits train and test alone"):
        open_source(Data(name=name, test_split="rubbish"), None)
