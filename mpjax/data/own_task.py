"""Opens a data set for a user's own task, with a field for each column."""

import functools
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Examples, MappedExamples, Source, array, renamed
from mpjax.data.fields import Field, Image, Label, Mask, Numbers, dtype_of_numbers
from mpjax.data.image_range import in_range
from mpjax.data.images.depth import EIGHT
from mpjax.data.images.masks import with_decoded_masks
from mpjax.data.table import Column, Table, Text, require_columns
from mpjax.data.user_function import PreprocessedExamples, load_preprocess, shape_after
from mpjax.errors import UsageError


def all_columns(table: Table, config: Data) -> Source:
    """Opens a stored data set as a `Source` that has a field for each column.

    With `config.preprocess`, it has a field for each entry of the dict that the function returns. `config.columns`, if
    not empty, maps fields to columns; other columns are dropped. The first training example is read now, to
    find the shape and dtype of each field; with a preprocess function and images, up to 16 examples are.

    Raises:
      UsageError: a column does not exist, or a value of the first example is text or no array of numbers.
    """
    columns = dict(config.columns) or {name: name for name in table.columns}
    require_columns(table, columns)
    chosen = {field: table.columns[column] for field, column in columns.items()}

    masks = [name for name, column in chosen.items() if isinstance(column, Mask)]
    if isinstance(mask := chosen.get("mask"), Image) and mask.depth.name != EIGHT.name:
        del chosen["mask"]  # class numbers are never scaled
        masks.append("mask")
    chosen, notes = in_range(chosen, config, table.name)
    rename = functools.partial(renamed, columns)
    train, test = (MappedExamples(split, rename) for split in table.open(tuple(dict.fromkeys(columns.values()))))
    if masks:
        decode = functools.partial(with_decoded_masks, masks)
        train, test = (MappedExamples(split, decode) for split in (train, test))
    if not config.preprocess:
        return Source(table.name, _fields(table.name, train, chosen, config), train, test, notes=notes)
    function = load_preprocess(config.preprocess)
    after, tests = (PreprocessedExamples(split, function, str(config.preprocess), chosen) for split in (train, test))
    shapes = {name: shape_after(after, name) for name, column in chosen.items() if isinstance(column, Image)}
    images: dict[str, Column] = {name: Image(shape) for name, shape in shapes.items() if shape}
    return Source(table.name, _fields(table.name, after, images, config), after, tests, notes=notes)


def _fields(set_name: str, examples: Examples, columns: dict[str, Column], config: Data) -> dict[str, Field]:
    return {
        name: _field(f"data set '{set_name}': {name}", value, columns.get(name), config if name == "label" else None)
        for name, value in examples[0].items()
    }


def _field(where: str, value: Any, column: Column | None, config: Data | None) -> Field:
    """Builds the field of a column: an image or a label if `column` is one, else numbers of the shape of `value`.

    Args:
      where: the name of the set and the field, for messages.
      value: the value of the first example.
      column: the stored type of the column; None if unknown.
      config: the settings, whose `num_classes`, if set, makes the field a label. None for any field but `label`.

    Raises:
      UsageError: the value is text, or no array of numbers.
    """
    if isinstance(column, Image):
        return column
    if config and config.num_classes:
        return Label(config.num_classes)
    if isinstance(column, Label) and column.num_classes:
        return column
    if isinstance(column, Text) or isinstance(value, (str, bytes)):
        raise UsageError(
            f"{where} is text; wanted numbers; convert it with --data.preprocess FILE.py:FUNCTION, or name the other "
            "columns in --data.columns"
        )
    numbers = array(where, value)
    return Numbers(np.shape(numbers), dtype_of_numbers(where, numbers.dtype))
