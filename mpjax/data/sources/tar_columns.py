"""Reads the files of WebDataset's samples by their extensions: images, texts, class numbers, arrays and json."""

import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpjax.data.fields import Image
from mpjax.data.images.decoding import FileBytes
from mpjax.data.images.headers import stored_image
from mpjax.data.sources.tar_index import Shards
from mpjax.data.table import Column, Other, Text
from mpjax.errors import UsageError


IMAGES = {"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pfm"}
"""The extensions of images, in lower case."""

_TEXTS = {"txt", "text", "caption", "transcript"}
_NUMBERS = {"cls", "cls2"}
_JSON = "json"


class ColumnReader(NamedTuple):
    """How a column is read: the extension of its files, and a function from their content to its value."""

    extension: str
    value: Callable[[FileBytes], Any]


def columns_of(extension: str, shards: Shards) -> list[tuple[str, Column, ColumnReader]]:
    """Describes the columns of the files of one extension: one, or those of the entries of json files."""
    kind = extension.rpartition(".")[2]
    first = shards.read_one(extension, 0)
    if kind in IMAGES:
        shards.require(extension)
        image = stored_image(len(shards), lambda index: shards.read_one(extension, index), extension)
        return [(extension, image, ColumnReader(extension, lambda stored: stored))]
    if kind in _TEXTS:
        return [(extension, Text(), ColumnReader(extension, _text))]
    if kind in _NUMBERS:
        return [(extension, Other("int64", 0), ColumnReader(extension, _number))]
    if kind == "npy":
        array = _array(first)
        shape = f"{array.dtype} [{', '.join(map(str, array.shape))}]"
        column = Image(array.shape) if array.ndim == 3 and array.dtype.kind in "uf" else Other(shape, array.ndim)
        return [(extension, column, ColumnReader(extension, _array))]
    if kind == _JSON:
        return [
            (f"{extension}.{name}", _column_of(value), ColumnReader(extension, _Entry(name, type(value))))
            for name, value in _object(first).items()
        ]
    return [(extension, Other(f"files .{extension}, which are not read"), ColumnReader(extension, _refused))]


def _column_of(value: Any) -> Column:
    if isinstance(value, str):
        return Text()
    if isinstance(value, (bool, int, float)):
        return Other(str(np.asarray(value).dtype), 0)
    return Other(type(value).__name__)


def _text(stored: FileBytes) -> str:
    try:
        return stored.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{stored.path}: not UTF-8: {error}; convert the data to UTF-8") from error


def _number(stored: FileBytes) -> int:
    try:
        return int(stored)
    except ValueError:
        raise UsageError(
            f"{stored.path}: {stored[:40]!r} is no whole number; wanted a class number; names of classes are for .txt "
            "files, as in KEY.label.txt and --data.columns label label.txt"
        ) from None


def _array(stored: FileBytes) -> np.ndarray:
    try:
        return np.load(io.BytesIO(stored), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"{stored.path}: no array of numbers, as np.save writes it ({error})") from error


def _object(stored: FileBytes) -> dict[str, Any]:
    try:
        entries = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{stored.path}: no JSON ({error})") from error
    if not isinstance(entries, dict):
        raise UsageError(f"{stored.path}: {type(entries).__name__}; wanted a JSON object")
    return entries


class _Entry(NamedTuple):
    """Reads the entry `name` of a json file, whose value has the type `kind`."""

    name: str
    kind: type

    def __call__(self, stored: FileBytes) -> Any:
        value = _object(stored).get(self.name)
        if type(value) is self.kind or (self.kind is float and type(value) is int):
            return value
        raise UsageError(
            f"{stored.path}: '{self.name}' is {'missing' if value is None else repr(value)[:40]}; wanted "
            f"{self.kind.__name__}, as the first sample has"
        )


def _refused(stored: FileBytes) -> Any:
    raise UsageError(f"{stored.path}: files of this extension are not read; pickles among them may run code")
