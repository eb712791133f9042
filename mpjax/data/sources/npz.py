"""Opens the arrays of a NumPy file, FILE.npz, as a data set; pickled objects in it are never read."""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.config.tasks import TaskName
from mpjax.data.examples import Examples
from mpjax.data.fields import Image, Label
from mpjax.data.sources.class_numbers import Numbered, classes_of
from mpjax.data.sources.own import ArrayRows, Joined
from mpjax.data.table import SPLIT_WORDS, Column, Other, Table, Text, parts_of
from mpjax.errors import AbsentData, UsageError, first_line, is_exhausted


_WHOLE = "train"  # the only split of a file whose names of arrays name none
_OF_SPLIT = re.compile("({0})_(.+)|(.+)_({0})".format("|".join(SPLIT_WORDS)), re.IGNORECASE)
_USUAL = {
    "image": ("x", "X", "images", "data", "imgs"),
    "label": ("y", "Y", "labels", "targets"),
    "mask": ("masks", "y", "Y"),
    "text": ("x", "X", "texts", "sentences"),
}
_CHUNK = 2**20


@dataclasses.dataclass(frozen=True)
class Header:
    """What the header of a stored array says, and whether the array is compressed."""

    dtype: np.dtype
    shape: tuple[int, ...]
    compressed: bool

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes, not compressed."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=object))


@dataclasses.dataclass(frozen=True, eq=False)
class NumpyFile:
    """The arrays of a file by name, each read at most once. Compressed ones may take `most` bytes together."""

    path: pathlib.Path
    most: float
    read: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def headers(self) -> dict[str, Header]:
        """The header of each array. Raises UsageError if the file has no arrays, or is damaged."""
        headers = {}
        with _damage_told(self.path), zipfile.ZipFile(self.path) as file:
            for member in file.infolist():
                if member.filename.endswith(".npy"):
                    with file.open(member) as opened:
                        shape, _, dtype = _header(opened)
                    name = member.filename.removesuffix(".npy")
                    headers[name] = Header(dtype, shape, member.compress_type != zipfile.ZIP_STORED)
        if not headers:
            raise UsageError(f"{self.path} has no arrays; wanted a file that np.savez wrote")
        return headers

    def array(self, name: str) -> np.ndarray:
        """Reads the array `name` and verifies its checksum; an array that is not compressed is memory-mapped.

        Raises:
          UsageError: the array holds pickled objects, is damaged, or is compressed and too large.
        """
        if name in self.read:
            return self.read[name]
        header = self.headers[name]
        if header.dtype.hasobject:
            raise UsageError(
                f"{self.path}: '{name}' holds pickled Python objects, which are not read, because reading them may run "
                "code of whoever wrote the file; write numbers, or texts as np.asarray(texts, dtype=str)"
            )
        if header.compressed:
            others = (self.headers[other] for other in self.read)
            size = header.nbytes + sum(other.nbytes for other in others if other.compressed)
            if size > self.most:
                raise UsageError(
                    f"{self.path}: compressed arrays are held in memory, and with '{name}' they take "
                    f"{size / 1e6:,.0f} MB; write --data.in_memory_mb {-(-size // 10**6)}, or store the arrays by "
                    "np.savez, which does not compress them, so that they are memory-mapped"
                )
        with _damage_told(self.path), zipfile.ZipFile(self.path) as file:
            member = file.getinfo(f"{name}.npy")
            self.read[name] = _loaded(file, member) if header.compressed else _mapped(self.path, file, member)
        return self.read[name]


@contextlib.contextmanager
def _damage_told(path: pathlib.Path) -> Iterator[None]:
    """Context manager that converts errors inside its `with` block to a UsageError that names the file.

    UsageErrors and errors of an exhausted machine pass unchanged.
    """
    try:
        yield
    except Exception as error:  # zipfile, zlib and NumPy raise many types
        if isinstance(error, UsageError) or is_exhausted(error):
            raise
        raise UsageError(
            f"{path}: damaged, or no file of np.savez ({first_line(error)}); copy it or write it again"
        ) from error


def _header(opened: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads the header of an array: its shape, whether its first axis varies fastest, and its dtype."""
    version = npy.read_magic(opened)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} of the format, for records; wanted plain arrays")
    return (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(opened)


def _loaded(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with file.open(member) as opened:
        array = npy.read_array(opened, allow_pickle=False)
        if opened.read(1):  # also verifies the checksum, at the end of the member
            raise ValueError(f"{member.filename} is longer than its header says")
        return array


def _mapped(path: pathlib.Path, file: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with file.open(member) as opened:
        shape, columns_first, dtype = _header(opened)
        start = opened.tell()
        while opened.read(_CHUNK):  # a mapped file is never read as a whole again, so its checksum is verified here
            pass
    with path.open("rb") as raw:
        raw.seek(member.header_offset + 26)  # the lengths of name and extra field in the local header of the member
        name, extra = np.frombuffer(raw.read(4), "<u2").tolist()
    if 0 in shape:
        return np.empty(shape, dtype)  # nothing to map
    offset = member.header_offset + 30 + name + extra + start
    if start + dtype.itemsize * int(np.prod(shape, dtype=object)) != member.file_size:
        raise ValueError(f"{member.filename} has another size than its header says")
    return np.memmap(path, dtype, "r", offset, shape, "F" if columns_first else "C")


def open_npz(name: str, task: TaskName, config: Data) -> Table:
    """Opens a file of arrays as a data set, whose examples are the rows of the arrays.

    An array named `train_images`, `x_test` or the like is a column of that split. A file without such names is one
    split, `train`. Arrays of another length than the others, such as names of classes, are left out. Integers or floats
    [N, H, W] are images of one channel, for the task `own` numbers. Headers are read now, and an array when its column
    is used.

    Raises:
      UsageError: the file does not exist or is no file of arrays, a split does not exist, or arrays of one split differ
        in length. Later: an array holds pickled objects, is damaged, or differs in dtype or shape between the splits.
    """
    path = expanded(name)
    if not path.is_file():
        raise AbsentData(f"data set '{name}': there is no file {path.absolute()}; wanted a file that np.savez wrote")
    file = NumpyFile(path, config.in_memory_mb * 1e6)
    splits = _splits(file.headers, name)
    sizes = {split: file.headers[next(iter(arrays.values()))].shape[0] for split, arrays in splits.items()}
    train, test = (parts_of(expression, sizes, name) for expression in (config.train_split, config.test_split))
    used = list(dict.fromkeys(part.split for part in (*train, *test)))
    shared = [column for column in splits[used[0]] if all(column in splits[split] for split in used)]
    columns = {
        column: _column(column, [file.headers[splits[s][column]] for s in used], name, task) for column in shared
    }

    def table(columns: Mapping[str, Column], numbered: Mapping[str, Numbered]) -> Table:
        def open_columns(names: Sequence[str]) -> tuple[Examples, Examples]:
            rows = {split: _rows(file, splits[split], names, columns, numbered) for split in used}
            return Joined(rows, train, names), Joined(rows, test, names)

        def labelled(column: str) -> Table:
            if isinstance(columns[column], Label):
                return table(columns, numbered)
            stored = [_labels(file.array(arrays[column])) for arrays in splits.values() if column in arrays]
            label, number = classes_of(stored, column, name, config.ignore_index)
            return table({**columns, column: label}, {**numbered, column: number})

        preferred = {field: next((usual for usual in names if usual in columns), "") for field, names in _USUAL.items()}
        return Table(name, columns, open_columns, preferred, labelled)

    return table(columns, {})


def _splits(headers: Mapping[str, Header], set_name: str) -> dict[str, dict[str, str]]:
    """Groups arrays into splits: for each split, the name of the array of each column.

    Names count as those of splits only if most arrays have one: `x`, `y` and `val_loss` are one split.

    Raises:
      UsageError: arrays of a split differ in length, so that it is not known how many examples there are, or two are
        one column, as `x_train` and `train_x` are.
    """
    splits: dict[str, dict[str, str]] = {}
    twice: tuple[str, ...] = ()
    for name in headers:
        if matched := _OF_SPLIT.fullmatch(name):
            first, after, before, last = matched.groups()
            columns = splits.setdefault((first or last).lower(), {})
            if other := columns.get(after or before):
                twice = other, name
            columns[after or before] = name
    if sum(map(len, splits.values())) <= len(headers) / 2:
        splits = {_WHOLE: {name: name for name in headers}}
    elif twice:
        raise UsageError(
            f"data set '{set_name}': {' and '.join(map(repr, twice))} are one column of one split; store one of them, "
            "or under another name"
        )
    return {split: _of_one_length(arrays, headers, f"data set '{set_name}'") for split, arrays in splits.items()}


def _of_one_length(arrays: Mapping[str, str], headers: Mapping[str, Header], where: str) -> dict[str, str]:
    """Keeps the columns whose arrays have one length, [N, ...]: all of them, or the only two or more that agree."""
    lengths = {column: headers[name].shape[0] for column, name in arrays.items() if headers[name].shape}
    counts = collections.Counter(lengths.values())
    several = [length for length, count in counts.items() if count > 1 or len(counts) == 1]
    if len(several) != 1:
        stored = ", ".join(f"{name} {list(headers[name].shape)}" for name in arrays.values())
        raise UsageError(f"{where}: arrays {stored}; wanted two or more of one length, the number of examples")
    return {column: arrays[column] for column, length in lengths.items() if length == several[0]}


def _column(column: str, stored: Sequence[Header], set_name: str, task: TaskName) -> Column:
    """Describes a column by the headers of its arrays, one for each split.

    Raises:
      UsageError: the splits differ in dtype or in the shape of an example, or the channels of images come first.
    """
    kinds = [f"{header.dtype} {list(header.shape[1:])}" for header in stored]
    dtype, shape = stored[0].dtype, stored[0].shape[1:]
    if dtype.kind in "SU" and not shape and all(header.dtype.kind in "SU" for header in stored):
        return Text()
    if len({*kinds}) > 1:
        raise UsageError(
            f"data set '{set_name}': '{column}' is {' in one split and '.join(dict.fromkeys(kinds))} in another; "
            "wanted one dtype and shape"
        )
    if dtype.hasobject:
        return Other("pickled Python objects, which are not read")
    if dtype.kind not in "uif" or (task == "own" and (len(shape) != 3 or dtype.kind == "i")):
        return Other(kinds[0], len(shape))
    if len(shape) == 2:
        return Image((*shape, 1))
    if len(shape) != 3:
        # One integer in a row of its own is a class number like any other.
        return Other(kinds[0], 0 if shape == (1,) and dtype.kind in "ui" else len(shape))
    few = (1, 2, 3, 4)
    if shape[0] in few and shape[2] not in few and task != "own":
        raise UsageError(
            f"data set '{set_name}': '{column}' has shape {stored[0].shape}, with channels first; wanted [examples, "
            f"height, width, channels]; store np.moveaxis({column}, 1, -1)"
        )
    return Image(shape)


def _labels(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values)) if values.shape[1:] == (1,) else values


def _rows(
    file: NumpyFile,
    arrays: Mapping[str, str],
    names: Sequence[str],
    columns: Mapping[str, Column],
    numbered: Mapping[str, Numbered],
) -> Examples:
    stored = {}
    for name in names:
        values = file.array(arrays[name])
        if name in numbered:
            values = numbered[name](_labels(values))
        elif isinstance(columns[name], Image) and values.ndim == 3:
            values = values[..., None]
        stored[name] = values
    return ArrayRows(stored)
