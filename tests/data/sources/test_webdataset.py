"""Tar files in the layout of WebDataset: their splits, columns and positions, and what damages them."""

import gzip
import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image as Pillow

from mpjax.config import Data
from mpjax.data import Image, Label, open_source
from mpjax.errors import UsageError


WHOLE = {"train_split": "train", "test_split": "train"}


def png(value, size=4):
    buffer = io.BytesIO()
    Pillow.fromarray(np.full((size, size), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def sample(key, number, **others):
    files = {f"{key}.png": png(number), f"{key}.cls": str(number % 3).encode()}
    return files | {f"{key}.{extension.replace('_', '.')}": content for extension, content in others.items()}


def written(path, files):
    """Writes a tar file of names and contents; `files` may be pairs, so that a name can come twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items() if isinstance(files, dict) else files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def shard(path, start, stop):
    return written(path, {name: c for at in range(start, stop) for name, c in sample(f"{at:04}", at).items()})


def opened(where, task="classification", **settings):
    return open_source(Data(name=f"webdataset:{where}", **settings), None, task)


def numbers(examples):
    """The gray value of each image, and its label."""
    rows = examples.__getitems__(range(len(examples)))
    return [(Pillow.open(io.BytesIO(row["image"])).getpixel((0, 0)), int(row["label"])) for row in rows]


def test_any_position_of_any_shard_is_reached(tmp_path):
    for name, start, stop in (("a-0.tar", 0, 2), ("a-1.tar", 2, 3), ("a-2.tar", 3, 7)):
        shard(tmp_path / name, start, stop)
    source = opened(tmp_path, train_split="train[:5]", test_split="train[5:]")
    assert source.fields == {"image": Image((4, 4, 1)), "label": Label(3)}
    assert numbers(source.train) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]
    assert numbers(source.test) == [(5, 2), (6, 0)]
    assert source.train.__getitems__([4, 0])[0]["label"] == 1


@pytest.mark.parametrize(
    ("train", "test", "where"),
    [
        ("train/0.tar", "val/0.tar", ""),
        ("imagenet-train-000000.tar", "imagenet-val-000000.tar", ""),
        ("train_0.tar", "val_0.tar", "*.tar"),
    ],
)
def test_a_split_is_a_folder_or_a_word_in_the_names(tmp_path, train, test, where):
    shard(tmp_path / train, 0, 3)
    shard(tmp_path / test, 7, 9)
    source = opened(tmp_path / where, test_split="val")
    assert (numbers(source.train), numbers(source.test)) == ([(0, 0), (1, 1), (2, 2)], [(7, 1), (8, 2)])
    with pytest.raises(UsageError, match="has no split 'test'.*; write --data.test_split val to evaluate on it"):
        opened(tmp_path / where)


def test_a_range_names_its_shards_and_one_that_is_missing_is_told(tmp_path):
    for at in range(8, 11):
        shard(tmp_path / f"a-{at:02}.tar", at, at + 1)
    assert numbers(opened(tmp_path / "a-{09..10}.tar", **WHOLE).train) == [(9, 0), (10, 1)]
    with pytest.raises(UsageError, match="there is no file .*a-11.tar"):
        opened(tmp_path / "a-{08..11}.tar", **WHOLE)


def test_shards_of_which_only_some_name_a_split_are_refused(tmp_path):
    shard(tmp_path / "train-0.tar", 0, 1)
    shard(tmp_path / "more.tar", 1, 2)
    with pytest.raises(
        UsageError, match="more.tar names no split, and train is named by others; wanted a split in all"
    ):
        opened(tmp_path, **WHOLE)


def test_labels_may_be_names_and_those_of_the_training_split_number_them(tmp_path):
    for split, names in (("train", "ca"), ("val", "ac"), ("test", "ab")):
        files = {
            f"{at}.{end}": c for at, name in enumerate(names) for end, c in (("png", png(at)), ("txt", name.encode()))
        }
        written(tmp_path / f"{split}.tar", files)
    source = opened(tmp_path, test_split="val", columns={"label": "txt"})
    assert source.fields["label"].names == ("a", "c")
    assert (numbers(source.train), numbers(source.test)) == ([(0, 1), (1, 0)], [(0, 0), (1, 1)])
    source = opened(tmp_path, columns={"label": "txt"})
    with pytest.raises(
        UsageError, match="'b' is no class of the training split; its classes are a, c; wanted the same"
    ):
        source.test[1]


def test_entries_of_json_are_columns(tmp_path):
    entries = [{"label": 2, "caption": "red", "score": 0.5}, {"label": 0, "caption": "blue", "score": 1}]
    files = {
        f"{at}.{end}": c
        for at, e in enumerate(entries)
        for end, c in (("png", png(at)), ("json", json.dumps(e).encode()))
    }
    written(tmp_path / "a.tar", files)
    assert numbers(opened(tmp_path, **WHOLE).train) == [(0, 2), (1, 0)]
    texts = opened(tmp_path, "text_classification", length=8, num_classes=3, **WHOLE)
    assert texts.train[1]["tokens"].tolist()[:5] == [2, *(byte + 3 for byte in b"blue")]
    own = opened(tmp_path, "own", columns={"x": "json.score"}, **WHOLE)
    assert [float(own.train[at]["x"]) for at in (0, 1)] == [0.5, 1.0]


def test_an_entry_of_another_type_or_none_is_told(tmp_path):
    files = {
        f"{at}.{end}": c
        for at, e in enumerate([{"label": 2}, {"label": "2"}])
        for end, c in (("png", png(at)), ("json", json.dumps(e).encode()))
    }
    written(tmp_path / "a.tar", files)
    with pytest.raises(UsageError, match="a.tar:1.json: 'label' is '2'; wanted int, as the first sample has"):
        opened(tmp_path, **WHOLE)


def test_a_mask_is_chosen_by_its_extension(tmp_path):
    files = {f"{at}.{end}": png(v) for at in (0, 1) for end, v in (("png", 9), ("seg.png", at))}
    written(tmp_path / "a.tar", files)
    source = opened(tmp_path, "segmentation", num_classes=2, **WHOLE)
    assert [int(source.train[at]["mask"].max()) for at in (0, 1)] == [0, 1]


def test_names_that_leave_the_folder_are_only_compared(tmp_path):
    files = {"../../out.png": png(5), "../../out.cls": b"1", "/etc/x.png": png(6), "/etc/x.cls": b"0"}
    where = written(tmp_path / "in/a.tar", files)
    assert numbers(opened(where, **WHOLE).train) == [(5, 1), (6, 0)]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "in"]


def test_a_key_is_its_folder_and_its_name(tmp_path):
    where = written(tmp_path / "a.tar", sample("a/0", 1) | sample("b/0", 2))
    assert numbers(opened(where, **WHOLE).train) == [(1, 1), (2, 2)]


def test_hidden_files_and_files_without_an_extension_are_no_samples(tmp_path):
    where = written(tmp_path / "a.tar", {"._0.png": b"x", "README": b"y"} | sample("0", 1))
    assert numbers(opened(where, **WHOLE).train) == [(1, 1)]


class Harmful:
    """Unpickling it creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("extension", ["pyd", "npy"])
def test_a_pickle_is_never_executed(tmp_path, extension):
    trap = str(tmp_path / "executed")
    stored = io.BytesIO()
    if extension == "npy":
        np.save(stored, np.asarray(Harmful(trap), object))
    else:
        stored.write(pickle.dumps(Harmful(trap)))
    where = written(tmp_path / "a.tar", sample("0", 1, **{extension: stored.getvalue()}))
    with pytest.raises(
        UsageError, match="a.tar:0.npy: no array of numbers|a.tar:0.pyd: files of this extension are not"
    ):
        opened(where, "own", columns={"x": extension}, **WHOLE)
    assert not os.path.exists(trap)


def test_a_link_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("0.png")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(UsageError, match="a.tar: '0.png' is a link, a device or a file with holes; wanted regular"):
        opened(tmp_path, **WHOLE)


@pytest.mark.parametrize("kept", [0, 100, 512, 700, 1024, 2048, 3072, 4096 + 100])
def test_a_file_that_is_cut_anywhere_is_told(tmp_path, kept):
    """A header or a content of these samples takes 512 bytes, so 1024 and 2048 are between two files."""
    where = shard(tmp_path / "a.tar", 0, 3)
    where.write_bytes(where.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"a.tar is damaged or cut \(ReadError: .*\); copy it again"):
        opened(where, **WHOLE)


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path):
    where = shard(tmp_path / "a.tar", 0, 3)
    stored = bytearray(where.read_bytes())
    stored[2048 + 10] ^= 1  # in the name of the third file
    where.write_bytes(stored)
    with pytest.raises(UsageError, match="a.tar is damaged or cut .*no header and no end at byte 2,048"):
        opened(where, **WHOLE)


def test_a_file_that_was_cut_after_it_was_listed_is_told(tmp_path):
    where = shard(tmp_path / "a.tar", 0, 3)
    source = opened(where, num_classes=3, **WHOLE)
    where.write_bytes(where.read_bytes()[:1100])
    with pytest.raises(UsageError, match="a.tar was cut while it was read"):
        source.train[2]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            sample("0", 1) | {"1.png": png(2)},
            r"a.tar: sample 1 has no file .cls, which others have; .*\(1 of 2 lack it",
        ),
        ([*sample("0", 1).items(), *sample("1", 1).items(), ("0.txt", b"x")], "files of sample '0' are in two places"),
        ([*sample("0", 1).items(), ("0.PNG", b"x")], "a.tar: '0.PNG' comes twice; wanted one file of each extension"),
        ({"0.png": png(1), "0.cls": b"cat"}, "a.tar:0.cls: b'cat' is no whole number; wanted a class number; names of"),
        ({"0.png": b"GIF8", "0.cls": b"0"}, "a.tar:0.png: cannot be decoded"),
        ({"README": b"x"}, "a.tar has no samples; wanted files KEY.EXTENSION, such as 0001.jpg and 0001.cls"),
    ],
)
def test_what_is_wrong_in_a_tar_file_is_told_with_its_name(tmp_path, files, said):
    with pytest.raises(UsageError, match=said):
        opened(written(tmp_path / "a.tar", files), **WHOLE)


def test_a_compressed_file_and_an_empty_folder_are_told(tmp_path):
    with pytest.raises(UsageError, match="no tar files; wanted FILE.tar, a folder of such files, or a glob"):
        opened(tmp_path, **WHOLE)
    where = shard(tmp_path / "a.tar", 0, 1)
    where.write_bytes(gzip.compress(where.read_bytes()))
    with pytest.raises(UsageError, match="a.tar is compressed, so that no sample can be reached without all before it"):
        opened(where, **WHOLE)


@pytest.mark.parametrize("where", ["a.tar", ""])
def test_a_path_alone_is_answered_with_the_name_to_write(tmp_path, where):
    shard(tmp_path / "set/a.tar", 0, 1)
    path = str(tmp_path / "set" / where).rstrip("/")
    with pytest.raises(UsageError, match=f"write --data.name webdataset:{path}") as refused:
        open_source(Data(name=path), tmp_path / "data")
    assert refused.value.repair == {"data.name": f"webdataset:{path}"}


def test_a_line_break_behind_the_name_of_a_class_makes_no_other_class(tmp_path):
    names = (b"dog", b"cat\n", b"cat", b"dog\r\n")
    written(
        tmp_path / "0.tar", {f"{n}.{e}": c for n, name in enumerate(names) for e, c in (("png", png(n)), ("txt", name))}
    )
    source = opened(tmp_path, columns={"label": "txt"}, **WHOLE)
    assert source.fields["label"] == Label(2, origin="column 'txt'", names=("cat", "dog"))
    assert numbers(source.train) == [(0, 1), (1, 0), (2, 0), (3, 1)]


def test_a_tar_file_that_would_be_left_out_is_an_error(tmp_path):
    for name in ("train/0.tar", "val/0.tar", "more.tar"):
        shard(tmp_path / name, 0, 3)
    with pytest.raises(UsageError, match=r"more.tar lies beside the folders train, val, and would"):
        opened(tmp_path, test_split="val")
    (tmp_path / "more.tar").unlink()
    shard(tmp_path / "train" / "more" / "1.tar", 0, 3)
    with pytest.raises(UsageError, match=r"1.tar lies in a folder of the split train"):
        opened(tmp_path, test_split="val")


def test_of_images_with_two_extensions_none_is_guessed(tmp_path):
    files = {f"{n}.{end}": c for n in range(3) for end, c in (("jpg", png(n)), ("png", png(9 - n)), ("cls", b"0"))}
    written(tmp_path / "0.tar", files)
    with pytest.raises(UsageError, match=r"several columns that could be the image.*--data.columns image COLUMN"):
        opened(tmp_path, **WHOLE)
    assert numbers(opened(tmp_path, columns={"image": "png"}, **WHOLE).train) == [(9, 0), (8, 0), (7, 0)]
