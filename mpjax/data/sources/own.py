"""Opens a user's own data: arrays in memory, objects with a length and integer indices, or iterables of examples."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.config.user_calls import file_of, named_failure, require_call
from mpjax.config.user_code import load_function
from mpjax.data.examples import Example, Examples, Source, require_unmasked
from mpjax.data.fields import Image
from mpjax.data.images.headers import stored_image
from mpjax.data.table import Column, Other, SplitPart, Table, Text, parts_of
from mpjax.errors import UsageError, failure


_WANTED = (
    "wanted (train, test) or a dict of splits, each a dict of arrays [N, ...], something with a length and integer "
    "indices, or an iterable of examples"
)
_TRIED = 16  # the number of examples that determine the shape of images


@dataclasses.dataclass(frozen=True)
class ArrayRows(Examples):
    """Examples that are the rows of arrays [N, ...], one array per column."""

    arrays: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> Example:
        return {name: values[index] for name, values in self.arrays.items()}


@dataclasses.dataclass(frozen=True)
class Indexed(Examples):
    """Examples from an object with a length and integer indices, which each process and thread reads on demand.

    An element that is a tuple or a list, as in torchvision, has the columns `0`, `1` and so on. Tensors of other
    libraries become NumPy arrays. An element that fails to load, or is neither a mapping nor a tuple or list, is a
    UsageError when it is read.

    Args:
      dataset: the object, such as a `grain.MapDataset`, a torch `Dataset` or a list.
      name: the name of the object in messages.
    """

    dataset: Any
    name: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Example:
        try:
            example = self.dataset[int(index)]
        except UsageError:
            raise
        except Exception as error:  # a context manager would cost time for each example
            raise UsageError(f"{self.name}: example {index} failed: {failure(error, file_of(self.dataset))}") from error
        if isinstance(example, (tuple, list)):  # as in torchvision: columns are numbered
            example = {str(number): value for number, value in enumerate(example)}
        if not isinstance(example, Mapping):
            raise UsageError(f"{self.name}: example {index} is {type(example).__name__}; wanted a dict of fields")
        return {str(name): _plain(str(name), value) for name, value in example.items()}


@dataclasses.dataclass(frozen=True)
class Joined:
    """The examples of ranges of splits, one range after the other, with only the columns `columns`.

    Reading an example that lacks one of the columns is a UsageError.
    """

    splits: Mapping[str, Examples]
    parts: Sequence[SplitPart]
    columns: Sequence[str]

    def __len__(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        places = [self._place(index) for index in indices]
        examples = [self.splits[split][number] for split, number in places]
        return [{name: _column_of(example, name) for name in self.columns} for example in examples]

    def _place(self, index: int) -> tuple[str, int]:
        """Finds the split of example `index`, and its number in that split. Raises IndexError if there is none."""
        before = 0
        for part in self.parts:
            if before <= index < before + part.stop - part.start:
                return part.split, part.start + index - before
            before += part.stop - part.start
        raise IndexError(index)


def _column_of(example: Example, name: str) -> Any:
    if name not in example:
        raise UsageError(f"an example has no '{name}', which the first one has; it has {', '.join(example)}")
    return example[name]


def open_own(config: Data) -> Table | Source:
    """Opens the user's data that `config.name` names: the result of a function, or an object that is not callable.

    A `Source` is returned unchanged. Otherwise the data are a pair (train, test) or a dict of splits by name, and are
    returned as a `Table`. A split is a dict of arrays, an object with a length and integer indices, or an iterable or a
    function that returns one. Iterables are read into memory now. The types of the columns are found from up to 16
    examples of the first split in `config.train_split`.

    Raises:
      UsageError: the function does not exist, fails or returns something else, a split does not exist, its arrays
        differ in length, or an iterable is empty or larger than `config.in_memory_mb`.
    """
    where = f"--data.name {config.name}"
    data = function = load_function(config.name, flag="--data.name")
    if callable(function):
        require_call(function, (), where)
        with named_failure(f"{where} failed", function):
            data = function()
    if isinstance(data, Source):
        return data
    if isinstance(data, Mapping) and any(map(_is_column, data.values())):
        raise UsageError(
            f"{where} returned one dict of {', '.join(map(str, data))}, which are columns and not splits; return two "
            "such dicts, (train, test): the examples to train on and those to test"
        )
    if isinstance(data, (tuple, list)) and len(data) == 2:
        data = dict(zip(("train", "test"), data, strict=True))
    if not isinstance(data, Mapping) or not data or not all(isinstance(name, str) for name in data):
        raise UsageError(f"{where} returned {_described(data)}; {_WANTED}")
    splits = {name: _examples(split, f"{where}, split '{name}'", config) for name, split in data.items()}
    sizes = {name: len(split) for name, split in splits.items()}
    train, test = (
        parts_of(expression, sizes, str(config.name)) for expression in (config.train_split, config.test_split)
    )
    first = splits[next(part.split for part in train if part.start < part.stop)]
    tried = max(1, min(len(first), _TRIED))
    sample = [first[index * len(first) // tried] for index in range(tried)]
    columns = {name: _column(name, [x[name] for x in sample if name in x], where) for name in sample[0]}

    def open_columns(names: Sequence[str]) -> tuple[Examples, Examples]:
        return Joined(splits, train, tuple(names)), Joined(splits, test, tuple(names))

    return Table(str(config.name), columns, open_columns)


def _is_column(values: Any) -> bool:
    """True for an array or a list of plain values, which is a column: the elements of a split have fields."""
    if isinstance(values, list):
        return bool(values) and not isinstance(values[0], (Mapping, tuple, list))
    return hasattr(values, "__array__")


def _described(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list, Mapping)) else "")


def _examples(split: Any, where: str, config: Data) -> Examples:
    if isinstance(split, Mapping):
        arrays = {str(name): _rows(str(name), values) for name, values in split.items()}
        lengths = {name: values.shape[0] if values.ndim else None for name, values in arrays.items()}
        if not arrays or None in lengths.values() or len(set(lengths.values())) > 1:
            raise UsageError(f"{where}: arrays of lengths {lengths}; wanted one length, the number of examples")
        return ArrayRows(arrays)
    if hasattr(split, "__len__") and hasattr(split, "__getitem__"):
        return Indexed(split, where)
    function = split
    with named_failure(f"{where} failed", function):
        if callable(function):
            split = function()
        if isinstance(split, Iterable):
            return Indexed(_read(split, where, config), where)
    raise UsageError(f"{where}: {_described(split)}; {_WANTED}")


def _rows(name: str, values: Any) -> np.ndarray:
    # An array of NumPy's own bytes or text strips zeros at the end of each.
    is_text = isinstance(values, (tuple, list)) and any(isinstance(value, (bytes, str)) for value in values)
    return np.asarray(_plain(name, values), object if is_text else None)


def _read(split: Iterable, where: str, config: Data) -> list[Any]:
    """Reads all examples of an iterable into a list.

    Raises:
      UsageError: the iterable is empty, or its arrays are larger than `config.in_memory_mb`, in units of 10**6 bytes.
    """
    examples, size = [], 0
    for example in split:
        examples.append(example)
        values = (
            example.values() if isinstance(example, Mapping) else example if isinstance(example, (tuple, list)) else ()
        )
        size += sum(map(_bytes_of, values))
        if size > config.in_memory_mb * 1e6:
            raise UsageError(
                f"{where}: an iterable is read into memory, and {len(examples):,} examples are over "
                f"--data.in_memory_mb {config.in_memory_mb}; write a larger limit, or return something with a length "
                "and integer indices"
            )
    if not examples:
        raise UsageError(f"{where}: the iterable has no examples; an iterator can be read once, so return a new one")
    return examples


def _bytes_of(value: Any) -> int:
    """Computes the size in bytes of an array or a number, or the sum for all in nested lists, of any lengths."""
    return sum(map(_bytes_of, value)) if isinstance(value, list | tuple) else np.asarray(value).nbytes


def _plain(name: str, value: Any) -> Any:
    """Converts arrays and tensors of any library to NumPy arrays, and returns other values unchanged.

    Raises UsageError, which names the column `name`, if an array has masked elements.
    """
    require_unmasked(name, value)
    return np.asarray(value) if hasattr(value, "__array__") else value


def _column(name: str, values: Sequence[Any], where: str) -> Column:
    """Infers the type of the column `name` from some of its values: text, an image, or another type.

    The first value decides. A str is text. Bytes are an encoded image if they have the header of one, else `Other`. An
    array of three axes of unsigned integers or floats is an image. The height and width of an image are None if the
    values differ in size.

    Raises:
      UsageError: the first value is an array whose first axis has 1 to 4 elements and whose last axis has not: its
        channels come first. Or it is an encoded image, and another value cannot be decoded or has another depth.
    """
    first = values[0]
    if isinstance(first, str):
        return Text()
    if isinstance(first, bytes):
        try:
            stored_image(1, values.__getitem__, name)
        except UsageError:  # no images
            return Other("bytes")
        return stored_image(len(values), values.__getitem__, name)
    stored = np.asarray(first)
    if stored.dtype.kind in "US":
        return Text()
    if stored.ndim != 3 or stored.dtype.kind not in "uf":
        return Other(f"{stored.dtype} [{', '.join(map(str, stored.shape))}]", stored.ndim)
    few = (1, 2, 3, 4)
    if stored.shape[0] in few and stored.shape[2] not in few:
        raise UsageError(
            f"{where}: {name} has shape {stored.shape}, with channels first; wanted [height, width, channels]; write "
            f"np.moveaxis({name}, 0, -1)"
        )
    shapes = {np.shape(value) for value in values}
    height, width = stored.shape[:2] if len(shapes) == 1 else (None, None)
    return Image((height, width, stored.shape[2]))
