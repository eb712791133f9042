import concurrent.futures
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Picture

from mpjax.config import Data
from mpjax.data import Image, Label, Mask, Other, Text, conform, eval_batches, open_source, train_batches
from mpjax.data.sources import open_huggingface
from mpjax.errors import UsageError


datasets = pytest.importorskip("datasets", reason="pip install -e '.[hf]'")

pytestmark = pytest.mark.extra

GRAY = [[[0], [128]], [[255], [7]]]


def saved(folder, features=None, *, test=None, **columns):
    """A data set on disk, by default with the same in both splits."""
    splits = {
        name: datasets.Dataset.from_dict(c, features=features)
        for name, c in (("train", columns), ("test", test or columns))
    }
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    return f"hf:{folder / 'saved'}"


def opened(name, task="classification", **settings):
    return open_source(Data(name=name, **settings), None, task)


def features(**kinds):
    return datasets.Features(kinds)


def pixels(dtype, shape=(2, 2, 1)):
    return datasets.Array3D(shape, dtype)


def first(source):
    return conform(source.train[0], source.fields)


def test_columns_say_what_they_hold(tmp_path):
    name = saved(
        tmp_path,
        features(
            photo=datasets.Image(),
            kind=datasets.ClassLabel(names=["a", "b"]),
            body=datasets.Value("string"),
            number=datasets.Value("int64"),
            gray=datasets.List(datasets.List(datasets.Value("uint8"))),
            box=datasets.List(datasets.Value("float32"), length=4),
        ),
        photo=[Picture.new("RGB", (5, 4))] * 2,
        kind=[0, 1],
        body=["x", "y"],
        number=[3, 4],
        gray=[[[1, 2]]] * 2,
        box=[[0, 0, 1, 1]] * 2,
    )
    table = open_huggingface(name.removeprefix("hf:"), Data())
    assert table.columns == {
        "photo": Image((4, 5, 3)),
        "kind": Label(2),
        "body": Text(),
        "number": Other("int64", rank=0),
        "gray": Image((1, 2, 1)),
        "box": Other("float32 [4]", rank=1),
    }
    assert table.columns["kind"].names == ("a", "b")
    (train, _) = table.open(["photo", "body"])
    assert set(train[1]) == {"photo", "body"}
    assert train[1]["photo"].startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_in_lists_keep_their_dtype(tmp_path, dtype):
    source = opened(saved(tmp_path, features(img=pixels(dtype), label=datasets.ClassLabel(2)), img=[GRAY], label=[1]))
    example = first(source)
    assert (example["image"].dtype, example["image"].tolist()) == (dtype, GRAY)
    assert (example["label"].dtype, int(example["label"])) == (np.int32, 1)


def test_float64_lists_are_cast_once(tmp_path):
    name = saved(
        tmp_path,
        features(img=pixels("float64", (1, 1, 1)), label=datasets.ClassLabel(1)),
        img=[[[[1.0001]]]],
        label=[0],
    )
    image = first(opened(name))["image"]
    assert (image.dtype, image[0, 0, 0]) == (np.float32, np.float32(1.0001))


def test_lists_from_json_have_lost_their_dtype_and_are_refused_with_the_line_to_write(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"img": GRAY, "label": 0}))
    with pytest.raises(
        UsageError, match=r"image \(column 'img'\): dtype int64; wanted uint8 .*write image.astype\(np.uint8\)"
    ):
        first(opened(f"hf:{tmp_path / 'x.jsonl'}", test_split="train"))


def test_and_that_line_helps(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"img": GRAY, "label": 0}))
    function = tmp_path / "own.py"
    function.write_text(
        "import numpy as np\ndef f(example):\n    image, label = example['image'], example['label']\n"
        "    return {'image': image.astype(np.uint8), 'label': label}\n"
    )
    source = opened(f"hf:{tmp_path / 'x.jsonl'}", test_split="train", preprocess=f"{function}:f", num_classes=1)
    assert first(source)["image"].dtype == np.uint8


def test_a_label_of_2049_stays_2049(tmp_path):
    kinds = features(image=pixels("uint8"), label=datasets.Value("int16"))
    source = opened(saved(tmp_path, kinds, image=[GRAY] * 2, label=[2049, 0]))
    assert source.fields["label"] == Label(2050)
    assert int(first(source)["label"]) == 2049


def test_integers_are_counted_over_both_splits(tmp_path):
    name = saved(tmp_path, text=["a", "b"], label=[0, 1], test={"text": ["c"], "label": [4]})
    assert opened(name, "text_classification").fields["label"] == Label(5)
    assert opened(name, "text_classification", num_classes=7).fields["label"] == Label(7)


def test_texts_are_classes_in_alphabetical_order_the_same_in_both_splits(tmp_path):
    name = saved(
        tmp_path, text=["x"] * 3, label=["pos", "neg", "pos"], test={"text": ["x"] * 2, "label": ["pos", "mid"]}
    )
    source = opened(name, "text_classification")
    assert source.fields["label"] == Label(3)
    assert source.fields["label"].names == ("mid", "neg", "pos")
    assert [int(example["label"]) for example in (*source.train, *source.test)] == [2, 1, 2, 2, 0]


def test_a_function_of_the_user_is_given_labels_as_they_are_stored(tmp_path):
    function = tmp_path / "own.py"
    function.write_text("def f(example):\n    return {**example, 'label': ['neg', 'pos'].index(example['label'])}\n")
    name = saved(tmp_path, text=["x"] * 2, label=["pos", "neg"])
    source = opened(name, "text_classification", preprocess=f"{function}:f", num_classes=2)
    assert [int(example["label"]) for example in source.train] == [1, 0]


def test_booleans_are_two_classes(tmp_path):
    source = opened(saved(tmp_path, text=["x"] * 2, label=[True, False]), "text_classification")
    assert [int(conform(example, source.fields)["label"]) for example in source.train] == [1, 0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floating_labels_are_refused_by_column(tmp_path, dtype):
    name = saved(
        tmp_path, features(text=datasets.Value("string"), score=datasets.Value(dtype)), text=["x"], score=[1.0]
    )
    write = (
        r"if the values of 'score' are whole, write --data.columns label score --data.num_classes N --data.preprocess"
    )
    with pytest.raises(
        UsageError, match=rf"label \(column 'score' of .*\): dtype {dtype}; wanted class numbers.*{write}"
    ):
        opened(name, "text_classification", columns={"label": "score"})
    with pytest.raises(
        UsageError, match=rf"no column that could be the label, .* a floating-point number is not.*{write}"
    ):
        opened(name, "text_classification")


def test_negative_labels_are_refused_by_column(tmp_path):
    with pytest.raises(UsageError, match=r"label \(column 'label' of .*\): -1 is negative; .*is the split labelled"):
        opened(saved(tmp_path, text=["x"], label=[-1]), "text_classification")


def test_one_hot_labels_are_refused_with_the_line_to_write(tmp_path):
    name = saved(tmp_path, text=["x"] * 2, label=[[0, 1, 0], [1, 0, 0]])
    says = r"(?s)label \(column 'label'\): int64 \[3\]; wanted one class.*'label': np.argmax\(ex"
    with pytest.raises(UsageError, match=says):
        opened(name, "text_classification", num_classes=3)
    function = tmp_path / "own.py"
    body = "return {**example, 'label': np.argmax(example['label'])}"
    function.write_text(f"import numpy as np\ndef FUNCTION(example): {body}\n")
    source = opened(name, "text_classification", num_classes=3, preprocess=f"{function}:FUNCTION")
    assert [int(example["label"]) for example in source.train] == [1, 0]


def test_with_a_function_of_the_user_labels_of_text_are_for_it_to_number(tmp_path):
    function = tmp_path / "own.py"
    function.write_text("def f(example): return example\n")
    name = saved(tmp_path, text=["x"] * 2, label=["pos", "neg"])
    says = r"write --data.num_classes N, and let .*own.py:f return the class number itself, an integer from 0"
    with pytest.raises(UsageError, match=says):
        opened(name, "text_classification", preprocess=f"{function}:f")


def test_a_column_of_class_numbers_is_no_mask(tmp_path):
    name = saved(tmp_path, features(image=pixels("uint8"), label=datasets.Value("int64")), image=[GRAY], label=[1])
    with pytest.raises(UsageError, match=r"no column that could be the mask.*for labelled images write --task class"):
        opened(name, "segmentation", num_classes=2)


def test_an_empty_text_of_a_csv_is_a_text_and_an_empty_label_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\na,0\n,1\n"",0\n')
    source = opened(f"hf:{tmp_path / 'a.csv'}", "text_classification", test_split="train", length=4)
    assert [int(example["length"]) for example in source.train] == [3, 2, 2]
    assert source.fields["label"] == Label(2)
    (tmp_path / "b.csv").write_text("text,label\na,yes\nb,\n")
    with pytest.raises(UsageError, match=r"label \(column 'label' of .*\): some texts are empty"):
        opened(f"hf:{tmp_path / 'b.csv'}", "text_classification", test_split="train")


@pytest.mark.parametrize("column", ["text", "label"])
def test_missing_values_are_refused_by_column(tmp_path, column):
    columns = {"text": ["a", "b"], "label": [0, 1]} | {column: [None, "a" if column == "text" else 1]}
    with pytest.raises(UsageError, match=f"column '{column}'.*: 1 of 2 values are missing, the first in row 0"):
        opened(saved(tmp_path, **columns), "text_classification")


def test_a_missing_image_is_said_to_be_missing(tmp_path):
    images = [{"bytes": encoded(10), "path": None}, None]
    name = saved(tmp_path, features(image=datasets.Image(), label=datasets.ClassLabel(2)), image=images, label=[0, 1])
    with pytest.raises(UsageError, match="column 'image' has no image in row 1 of the splits read"):
        opened(name)


def test_a_wrong_shape_is_refused_by_column(tmp_path):
    lists = datasets.List(datasets.List(datasets.Value("uint8")))
    name = saved(
        tmp_path, features(scan=lists, label=datasets.ClassLabel(2)), scan=[[[1, 2]], [[1, 2, 3]]], label=[0, 1]
    )
    source = opened(name, columns={"image": "scan"})
    with pytest.raises(UsageError, match=r"image \(column 'scan'\): shape \(1, 3, 1\); wanted \[1, 2, 1\]"):
        conform(source.train[1], source.fields)


def test_flat_lists_are_no_images(tmp_path):
    name = saved(
        tmp_path,
        features(pixels=datasets.List(datasets.Value("uint8")), label=datasets.ClassLabel(2)),
        pixels=[[1, 2]],
        label=[0],
    )
    with pytest.raises(UsageError, match=r"image \(column 'pixels'\): uint8 \[2\]; wanted images"):
        opened(name)


def test_masks_in_lists(tmp_path):
    lists = datasets.List(datasets.List(datasets.Value("uint8")))
    name = saved(tmp_path, features(image=pixels("uint8"), mask=lists), image=[GRAY], mask=[[[0, 1], [2, 255]]])
    source = opened(name, "segmentation", num_classes=3, ignore_index=(255,))
    assert source.fields["mask"] == Mask((2, 2), 3, ignores=True)
    (batch,) = eval_batches(source, Data(eval_batch_size=1))
    assert batch["mask"].tolist() == [[[0, 1], [2, 255]]]


def test_columns_must_be_alike_in_both_splits(tmp_path):
    for split, rows in (("train", {"text": ["a"], "label": [1]}), ("test", {"text": ["a"], "label": ["b"]})):
        datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved" / split)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"column 'label' is Value\('int64'\) in split 'train', but Value\('string'\)"):
        opened(f"hf:{tmp_path / 'saved'}", "text_classification")


def test_a_folder_of_images(tmp_path):
    for split in ("train", "test"):
        for number, name in enumerate(("ant", "bee")):
            (tmp_path / split / name).mkdir(parents=True)
            Picture.new("RGB", (4, 4), (number * 50, 0, 0)).save(tmp_path / split / name / "0.png")
    source = opened(f"hf:imagefolder:{tmp_path}")
    assert source.fields == {"image": Image((4, 4, 3)), "label": Label(2)}
    batch = next(train_batches(source, Data(batch_size=2, workers=0), 0).from_position(0))
    assert (batch["image"][:, 0, 0, 0] == 50 * batch["label"]).all()


def encoded(value):
    buffer = io.BytesIO()
    Picture.new("L", (4, 4), value).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("layout", ["datasets", "struct", "bytes", "struct without a path"])
def test_images_in_a_parquet_file_whoever_wrote_it(tmp_path, layout):
    """Only `datasets` says in the file that a column has images."""
    values = [encoded(value) for value in (10, 20)]
    rows = {
        "bytes": values,
        "struct": [{"bytes": value, "path": "not/there.png"} for value in values],
        "struct without a path": [{"bytes": value, "path": None} for value in values],
    }
    if layout == "datasets":
        kinds = features(image=datasets.Image(), label=datasets.Value("int64"))
        stored = datasets.Dataset.from_dict({"image": rows["struct"], "label": [0, 1]}, features=kinds)
        stored.to_parquet(tmp_path / "a.parquet")
    else:
        kind = pa.binary() if layout == "bytes" else pa.struct({"bytes": pa.binary(), "path": pa.string()})
        table = pa.table({"image": pa.array(rows[layout], kind), "label": [0, 1]})
        pq.write_table(table, tmp_path / "a.parquet")
    source = opened(f"hf:{tmp_path / 'a.parquet'}", test_split="train")
    assert source.fields == {"image": Image((4, 4, 1)), "label": Label(2)}
    batch = next(train_batches(source, Data(batch_size=2, workers=0), 0).from_position(0))
    assert (batch["image"][:, 0, 0, 0] == 10 + 10 * batch["label"]).all()


def test_bytes_that_are_no_images_and_a_damaged_image_are_told(tmp_path):
    pq.write_table(pa.table({"image": [b"RIFF", b"RIFF"], "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"image: Value\('binary'\); wanted images \[height, width, channels\]"):
        opened(f"hf:{tmp_path / 'a.parquet'}", test_split="train")
    pq.write_table(pa.table({"image": [encoded(3), b"RIFF"], "label": [0, 1]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match="column 'image': cannot be decoded"):
        opened(f"hf:{tmp_path / 'b.parquet'}", test_split="train")


def test_parts_of_splits(tmp_path):
    name = saved(tmp_path, text=list("abcdefghij"), label=[0, 1] * 5)
    source = opened(name, "text_classification", train_split="train[:30%]+test[9:]", test_split="train[8:]")
    assert [int(example["tokens"][1]) - 3 for example in source.train] == [97, 98, 99, 106]
    assert len(source.test) == 2
    with pytest.raises(UsageError, match=r"Unknown split 'dev'.*it has train \(10 examples\), test \(10 examples\)"):
        opened(name, "text_classification", test_split="dev")


def test_many_threads_read_the_same_as_one(tmp_path):
    name = saved(
        tmp_path,
        features(image=pixels("uint8", (1, 1, 1)), label=datasets.Value("int64")),
        image=[[[[i % 256]]] for i in range(2000)],
        label=list(range(2000)),
    )
    train = opened(name).train
    chunks = [list(np.random.default_rng(seed).integers(2000, size=50)) for seed in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for chunk, examples in zip(chunks, pool.map(train.__getitems__, chunks), strict=True):
            assert [int(e["label"]) for e in examples] == chunk
            assert [int(e["image"][0, 0, 0]) for e in examples] == [i % 256 for i in chunk]


def test_floating_labels_that_are_whole_become_classes_by_what_the_message_says(tmp_path):
    name = saved(tmp_path, text=["x", "y"], score=[1.0, 0.0])
    (tmp_path / "own.py").write_text("def f(example): return {**example, 'label': int(example['label'])}")
    settings = {"columns": {"label": "score"}, "num_classes": 2, "preprocess": f"{tmp_path / 'own.py'}:f"}
    source = opened(name, "text_classification", **settings)
    assert [int(conform(example, source.fields)["label"]) for example in source.train] == [1, 0]
