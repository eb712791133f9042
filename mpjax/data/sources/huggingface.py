"""Opens Hugging Face data sets as tables: the type of each column, and its reader through Arrow."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mpjax.config.schema import Data
from mpjax.data.examples import Example
from mpjax.data.fields import Image, Label
from mpjax.data.images.decoding import FileBytes
from mpjax.data.images.headers import stored_image
from mpjax.data.sources import arrow
from mpjax.data.sources.huggingface_files import NAME, load_splits
from mpjax.data.table import Column, Other, Table, Text, parts_of, whole_numbers
from mpjax.errors import UsageError


Read = Callable[[Any], Any]
"""A function from an Arrow column to one value per row."""

Content = Callable[[Any], bytes]
"""A function from a stored value to an encoded image."""


@dataclasses.dataclass(frozen=True)
class ArrowExamples:
    """The examples of one split of a `datasets.Dataset`, read on access.

    `datasets` memory-maps its files, so threads read without locks and copies.

    Args:
      dataset: a `datasets.Dataset` that returns Arrow tables.
      read: for each column of an example, the function that converts it.
    """

    dataset: Any
    read: Mapping[str, Read]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        table = self.dataset[[int(index) for index in indices]]
        columns = [read(table[name]) for name, read in self.read.items()]
        return [dict(zip(self.read, values, strict=True)) for values in zip(*columns, strict=True)]


def open_huggingface(what: str, config: Data) -> Table:
    """Opens a data set with Hugging Face's `datasets` as a `Table`, whose splits are memory-mapped.

    Args:
      what: a path, or a name on the hub; see `load_splits`.
      config: the splits, `header` and `ignore_index`.

    Raises:
      UsageError: the data set cannot be loaded, a split does not exist, or a column of the training split is missing in
        the test split or has another type there.
    """
    splits = load_splits(what, config.header)
    import datasets

    set_name = f"{NAME}:{what}"
    sizes = {name: len(split) for name, split in splits.items()}
    train, test = (
        datasets.concatenate_datasets(
            [splits[p.split].select(range(p.start, p.stop)) for p in parts_of(expression, sizes, set_name)]
        ).with_format("arrow")
        for expression in (config.train_split, config.test_split)
    )
    columns: dict[str, Column] = {}
    reads: dict[str, Read] = {}
    for name, feature in train.features.items():
        if (other := test.features.get(name)) != feature:
            raise UsageError(
                f"data set '{set_name}': column '{name}' is {feature} in split '{config.train_split}', but "
                f"{other or 'missing'} in split '{config.test_split}'; wanted the same columns in both splits"
            )
        columns[name], reads[name] = _column(name, feature, train, test)
    return _table(set_name, columns, reads, train, test, config.ignore_index)


def _table(
    set_name: str,
    columns: Mapping[str, Column],
    reads: Mapping[str, Read],
    train: Any,
    test: Any,
    ignored: Sequence[int],
) -> Table:
    def open_columns(names: Sequence[str]) -> tuple[ArrowExamples, ArrowExamples]:
        chosen = {name: reads[name] for name in names}
        first, second = (ArrowExamples(split.select_columns(list(names)), chosen) for split in (train, test))
        return first, second

    def labelled(name: str) -> Table:
        if isinstance(columns[name], Label):
            return table
        label, read = classes_in(name, set_name, train, test, ignored)
        return _table(set_name, {**columns, name: label}, {**reads, name: read}, train, test, ignored)

    table = Table(set_name, columns, open_columns, labelled=labelled)
    return table


def _column(name: str, feature: Any, train: Any, test: Any) -> tuple[Column, Read]:
    import datasets

    called = f"column '{name}'"
    if isinstance(feature, datasets.ClassLabel):
        return Label(len(feature.names), names=tuple(feature.names)), _numbers(called)
    if isinstance(feature, datasets.Image):
        return _stored(name, train, test), _images(called, _content)
    if (content := _encoded(feature)) and len(train) and _is_image(name, train, content):
        return _stored(name, train, test), _images(called, content)
    if isinstance(feature, datasets.Value):
        if feature.dtype in ("string", "large_string", "string_view"):
            return Text(), _texts(called)
        if feature.dtype.startswith(("int", "uint", "float", "bool")):
            return Other(feature.dtype, 0), _numbers(called)
    if nested := _nested(feature):
        return _of_lists(called, nested, arrow.flat(train[:1][name]))
    return Other(str(feature)), lambda column: column.to_pylist()


def _nested(feature: Any) -> str:
    """Finds the dtype, as text, of the numbers in a feature of nested lists; empty for any other feature."""
    import datasets

    if isinstance(feature, (datasets.Array2D, datasets.Array3D)):
        return feature.dtype
    depth = 0
    while isinstance(feature, (datasets.List, datasets.LargeList)):
        feature, depth = feature.feature, depth + 1
    numeric = isinstance(feature, datasets.Value) and feature.dtype.startswith(("int", "uint", "float"))
    return feature.dtype if depth and numeric else ""


def _of_lists(called: str, dtype: str, first: Any) -> tuple[Column, Read]:
    """Finds the type and reader of a column of nested lists of numbers, by its first row, `first`.

    Lists of three levels, [H][W][C], are images; lists of two, [H][W], are images to which the reader adds an axis of 1
    channel. Lists of other levels are `Other`, as are lists of different lengths, which are read as Python lists.
    """
    read = _numbers(called)
    try:
        shape = read(first)[0].shape
    except UsageError:
        return Other(f"lists of {dtype} of different lengths"), lambda column: column.to_pylist()
    if len(shape) == 3:
        return Image(shape), read
    if len(shape) == 2:
        return Image((*shape, 1)), lambda column: arrow.numbers(column, called)[..., None]
    return Other(f"{dtype} [{', '.join(map(str, shape))}]", len(shape)), read


def _numbers(called: str) -> Read:
    return lambda column: arrow.numbers(column, called)


def _texts(called: str) -> Read:
    def read(column: Any) -> list[str]:
        arrow.require_all(column, called)
        return column.to_pylist()

    return read


def _encoded(feature: Any) -> Content | None:
    """Finds the function from a value to an encoded image, of a column that may hold images without saying so.

    Only `datasets` itself writes into a parquet file that a column has images. Other programs write the bytes, or a
    struct of bytes and path, as `datasets` stores them. None for any other column.
    """
    binary = ("binary", "large_binary")
    if getattr(feature, "dtype", "") in binary:
        return lambda stored: stored
    if isinstance(feature, Mapping) and feature.keys() == {"bytes", "path"} and feature["bytes"].dtype in binary:
        return _content
    return None


def _is_image(name: str, rows: Any, content: Content) -> bool:
    """True if the first value of a column is an encoded image."""
    first = arrow.flat(rows[:1][name]).to_pylist()[0]
    try:
        stored_image(1, lambda _: content(first), name)
    except (UsageError, TypeError, OSError):  # other bytes, a missing value, a path to nothing
        return False
    return True


def _images(called: str, content: Content) -> Read:
    def read(column: Any) -> list[bytes]:
        arrow.require_all(column, called)
        return [content(stored) for stored in column.to_pylist()]

    return read


def _content(stored: Mapping[str, Any]) -> bytes:
    return FileBytes.read(stored["path"]) if stored["bytes"] is None else stored["bytes"]


def _stored(name: str, train: Any, test: Any) -> Image:
    import datasets

    both: Any = datasets.concatenate_datasets([split.select_columns([name]) for split in (train, test)])

    def stored(index: int) -> bytes | str:
        value = arrow.flat(both[[index]][name]).to_pylist()[0]
        if value is None:
            raise UsageError(f"column '{name}' has no image in row {index} of the splits read; drop or fill such rows")
        if isinstance(value, bytes):
            return value
        return value["path"] if value["bytes"] is None else value["bytes"]

    return stored_image(len(both), stored, f"column '{name}'")


def classes_in(name: str, set_name: str, train: Any, test: Any, ignored: Sequence[int]) -> tuple[Label, Read]:
    """Builds the label type of the column `name` and a reader of its class numbers, which are alike in both splits.

    Integers are class numbers already: there are as many classes as the largest number of both splits, plus 1. The
    numbers `ignored` do not count. Booleans are classes 0 and 1. Texts are the names of classes, numbered in sorted
    order over both splits. The whole column of both splits is read here.

    Raises:
      UsageError: a value is missing, negative or an empty text, all values are ignored, or the column holds neither
        integers, booleans nor text.
    """
    called = f"column '{name}'"
    values = [arrow.flat(split.select_columns([name])[:][name]) for split in (train, test)]
    for value in values:
        arrow.require_all(value, f"{called} of '{set_name}'")
    kind = values[0].type
    if pa.types.is_boolean(kind):
        return Label(2), lambda column: arrow.numbers(column, called).astype(np.int32)
    if pa.types.is_integer(kind):
        if ignored:
            held = np.iinfo(kind.to_pandas_dtype())
            known = pa.array([number for number in ignored if held.min <= number <= held.max], kind)
            values = [value.filter(arrow.pc.invert(arrow.pc.is_in(value, known))) for value in values]
        bounds = [arrow.pc.min_max(value).as_py() for value in values if len(value)]
        if not bounds:
            raise UsageError(f"label ({called} of '{set_name}'): every one is ignored by --data.ignore_index")
        lowest = min(bound["min"] for bound in bounds)
        if lowest < 0:
            raise UsageError(
                f"label ({called} of '{set_name}'): {lowest} is negative; wanted class numbers from 0; is the split "
                "labelled? If it is, write --data.preprocess FILE.py:FUNCTION with a function that numbers the classes"
            )
        return Label(max(bound["max"] for bound in bounds) + 1), _numbers(called)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        names = pa.array(sorted({text for value in values for text in arrow.pc.unique(value).to_pylist()}), kind)
        if "" in names.to_pylist():
            raise UsageError(
                f"label ({called} of '{set_name}'): some texts are empty; wanted the name of a class in every row; "
                "drop or fill these rows, or number the classes in a function for --data.preprocess"
            )

        def numbered(column: Any) -> np.ndarray:
            return arrow.pc.index_in(arrow.flat(column), value_set=names).to_numpy(zero_copy_only=False)

        return Label(len(names), names=tuple(names.to_pylist())), numbered
    raise UsageError(
        f"label ({called} of '{set_name}'): dtype {_numpy_name(kind)}; wanted class numbers, integers or text; "
        f"{whole_numbers(name)}"
    )


def _numpy_name(kind: Any) -> str:
    return {"double": "float64", "float": "float32", "halffloat": "float16"}.get(str(kind), str(kind))
