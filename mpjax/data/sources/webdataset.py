"""Opens tar files in the layout of WebDataset (shards of KEY.jpg, KEY.cls, KEY.json, KEY.txt) as a data set."""

import dataclasses
import glob
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.data.examples import Example, Examples
from mpjax.data.fields import Label
from mpjax.data.images.decoding import FileBytes
from mpjax.data.sources.class_numbers import Numbered, classes_of
from mpjax.data.sources.own import Joined
from mpjax.data.sources.tar_columns import IMAGES, ColumnReader, columns_of
from mpjax.data.sources.tar_index import Shards
from mpjax.data.table import SPLIT_WORDS, Column, Table, Text, advice_on_splits, base_names, parts_of
from mpjax.errors import AbsentData, UsageError


NAME = "webdataset"
_WHOLE = "train"  # the only split of shards whose names name none
_PREFERRED = {
    "label": ("cls", "json.label", "json.cls", "json.class"),
    "mask": ("mask.png", "seg.png"),
    "text": ("txt", "text", "caption", "json.text", "json.caption"),
}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclasses.dataclass(frozen=True, eq=False)
class TarExamples(Examples):
    """Examples whose columns are files inside tar files, read on access."""

    shards: Shards
    columns: Mapping[str, ColumnReader]

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> Example:
        return {
            name: reading.value(self.shards.read_one(reading.extension, index))
            for name, reading in self.columns.items()
        }


def open_webdataset(where: str, config: Data) -> Table:
    """Opens tar files as a data set; the headers of all samples are read now, so that each can be reached.

    The columns are the extensions of the first sample, in lower case, and `json.NAME` for each entry of a json file.

    Args:
      where: a tar file, a folder of them or of folders named like splits, a glob, or a range such as
        `train-{000..146}.tar`. If the names of tar files have a word such as `train` or `val`, it is their split;
        otherwise all are the split `train`.
      config: the splits, `num_classes` and `ignore_index`.

    Raises:
      UsageError: a tar file is missing, compressed, damaged or cut, only some name a split, or a split does not exist.
        When columns are opened: a sample lacks a file, or a label is no number.
    """
    set_name = f"{NAME}:{where}"
    paths = _paths_by_split(where, set_name)
    wanted = dict.fromkeys(base_names(config.train_split) + base_names(config.test_split))
    used = [split for split in paths if split in wanted or "all" in wanted] or list(paths)[:1]
    if missing := [split for split in wanted if split not in paths and split != "all" and len(paths) > 1]:
        advice, repair = advice_on_splits(missing[0], list(paths))
        raise UsageError(
            f"data set '{set_name}' has no split '{missing[0]}'; there are {', '.join(paths)}; {advice}", repair=repair
        )
    shards = {split: Shards.read(paths[split]) for split in used}
    sizes = {split: len(shards[split]) for split in used}
    train, test = (parts_of(expression, sizes, set_name) for expression in (config.train_split, config.test_split))
    first = shards[train[0].split]
    columns: dict[str, Column] = {}
    readings: dict[str, ColumnReader] = {}
    for extension in first.places:
        for name, column, reading in columns_of(extension, first):
            columns[name], readings[name] = column, reading
    preferred = {field: next((name for name in names if name in columns), "") for field, names in _PREFERRED.items()}
    preferred["image"] = images[0] if len(images := [name for name in columns if name in IMAGES]) == 1 else ""

    def table(columns: Mapping[str, Column], readings: Mapping[str, ColumnReader]) -> Table:
        def open_columns(names: Sequence[str]) -> tuple[Examples, Examples]:
            chosen = {name: readings[name] for name in names}
            for split in used:
                for reading in chosen.values():
                    shards[split].require(reading.extension)
            splits = {split: TarExamples(shards[split], chosen) for split in used}
            return Joined(splits, train, names), Joined(splits, test, names)

        def labelled(name: str) -> Table:
            if isinstance(columns[name], Label) or (config.num_classes and not isinstance(columns[name], Text)):
                return table(columns, readings)
            label, number = _classes(name, readings[name], [p.split for p in train], [p.split for p in test])
            value = _as_class(readings[name].value)
            numbered = ColumnReader(readings[name].extension, lambda stored: number(np.asarray(value(stored)))[()])
            return table({**columns, name: label}, {**readings, name: numbered})

        return Table(set_name, columns, open_columns, preferred, labelled)

    def _classes(
        name: str, reading: ColumnReader, training: Sequence[str], testing: Sequence[str]
    ) -> tuple[Label, Numbered]:
        values, value = {}, _as_class(reading.value)
        for split in dict.fromkeys([*training, *testing]):
            shards[split].require(reading.extension)
            values[split] = np.asarray([value(stored) for stored in shards[split].read_all(reading.extension)])
        # A name that only the test split has would change the number of others from one test split to another.
        is_text = all(values[split].dtype.kind in "SU" for split in training)
        splits = dict.fromkeys(training if is_text else [*training, *testing])
        return classes_of([values[split] for split in splits], name, set_name, config.ignore_index)

    return table(columns, readings)


def _as_class(value: Callable[[FileBytes], Any]) -> Callable[[FileBytes], Any]:
    """Reads the name of a class without white space around it: editors and `echo` end a file with a line break."""

    def name(stored: FileBytes) -> Any:
        read = value(stored)
        return read.strip() if isinstance(read, str) else read

    return name


def _paths_by_split(where: str, set_name: str) -> dict[str, list[str]]:
    """Groups the tar files of a set by split.

    Raises:
      UsageError: there is no tar file, one of a range is missing, or only some names of tar files name a split.
    """
    path = expanded(where)
    folders = {
        folder: sorted(glob.glob(os.path.join(glob.escape(str(path / folder)), "*.tar")))
        for folder in (sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else ())
    }
    if folders := {folder: paths for folder, paths in folders.items() if paths}:
        _require_all_read(path, folders, set_name)
        return folders
    if path.is_dir():
        paths = sorted(glob.glob(os.path.join(glob.escape(str(path)), "*.tar")))
    else:
        written = _expanded_range(str(path))
        paths = sorted(glob.glob(str(path))) if glob.has_magic(str(path)) and len(written) == 1 else written
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise AbsentData(f"data set '{set_name}': there is no file {os.path.abspath(missing[0])}; wanted a tar file")
    if not paths:
        raise UsageError(f"data set '{set_name}': no tar files; wanted FILE.tar, a folder of such files, or a glob")
    splits: dict[str, list[str]] = {}
    for shard in paths:
        splits.setdefault(_split_in(os.path.basename(shard)), []).append(shard)
    if "" in splits and len(splits) > 1:
        raise UsageError(
            f"data set '{set_name}': {splits[''][0]} names no split, and {next(s for s in splits if s)} is named by "
            "others; wanted a split in all names or in none; move the file elsewhere"
        )
    return {split or _WHOLE: paths for split, paths in splits.items()}


def _require_all_read(path: pathlib.Path, folders: Mapping[str, Sequence[str]], set_name: str) -> None:
    """Raises UsageError if a tar file below `path` is in none of the folders of splits: it would be left out."""
    read = {pathlib.Path(shard) for paths in folders.values() for shard in paths}
    for shard in sorted(path.rglob("*.tar")):
        folder, *inside = shard.relative_to(path).parts
        if shard in read or any(part.startswith(".") for part in (folder, *inside)):
            continue
        where = f"in a folder of the split {folder}" if inside else f"beside the folders {', '.join(folders)}"
        raise UsageError(
            f"data set '{set_name}': {shard} lies {where}, and would not be read; wanted all tar files in folders "
            "named like splits, or all in one folder; move it"
        )


def _expanded_range(path: str) -> list[str]:
    """Expands the first range of numbers in a path, as in `a-{08..10}.tar`, with leading zeros as the first has."""
    if not (matched := _RANGE.search(path)):
        return [path]
    first, last = matched.groups()
    numbers = range(int(first), int(last) + 1)
    return [f"{path[: matched.start()]}{number:0{len(first)}}{path[matched.end() :]}" for number in numbers]


def _split_in(name: str) -> str:
    """Finds the only word of a file name that is a split; empty if there is none, or if there are several.

    >>> _split_in("imagenet-train-000012.tar"), _split_in("trainer.tar")
    ('train', '')
    """
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_WORDS]
    return words[0] if len(words) == 1 else ""
