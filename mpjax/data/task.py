"""From a stored data set to the examples of a task: columns chosen, custom function applied, text tokenized."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpjax.config.functions import load_function
from mpjax.config.schema import Data
from mpjax.config.task import TASKS, TaskName
from mpjax.data.columns import choose_columns
from mpjax.data.contract import array
from mpjax.data.examples import Example, Examples, Source
from mpjax.data.fields import Field, Image, Label, Mask
from mpjax.data.images import decode
from mpjax.data.preprocess import PreprocessedExamples
from mpjax.data.table import Column, Table
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class RenamedExamples:
    """Examples whose columns go by the names of the fields they serve as."""

    examples: Examples
    columns: dict[str, str]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self._rename(self.examples[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self._rename(example) for example in self.examples.__getitems__(indices)]

    def _rename(self, example: Example) -> Example:
        return {field: example[column] for field, column in self.columns.items()}


def as_task(table: Table, task: TaskName, config: Data) -> Source:
    """The data set as the task wants it.

    Raises:
      UsageError: there is no column for a field, or a setting is missing without which it cannot be read.
    """
    columns = choose_columns(table, TASKS[task].fields, config)
    chosen = {field: table.columns[column] for field, column in columns.items()}
    train, test = (RenamedExamples(split, columns) for split in table.open(tuple(dict.fromkeys(columns.values()))))
    if config.preprocess:
        function = load_function(config.preprocess, flag="--data.preprocess")
        decoded = _decoding(function, chosen)
        train, test = (PreprocessedExamples(split, decoded, config.preprocess) for split in (train, test))
        chosen = _after(train[0], chosen)
    if "text" in chosen:
        from mpjax.data.text import tokenized

        return tokenized(table.name, task, chosen, train, test, config)
    fields = {name: _field(name, column, table.name, config) for name, column in chosen.items()}
    return Source(table.name, fields, train, test)


def _decoding(function, chosen: dict[str, Column]):
    """`function` on examples whose images are arrays, whatever they are stored as."""
    channels = {name: column.shape[2] for name, column in chosen.items() if isinstance(column, Image)}

    def decoded(example: Example):
        return function({name: decode(v, channels[name]) if name in channels else v for name, v in example.items()})

    return decoded


def _after(example: Example, chosen: dict[str, Column]) -> dict[str, Column]:
    """What the columns hold after a custom function: images have the shape of the first that came out."""
    shapes = {n: array(n, example[n]).shape for n, c in chosen.items() if isinstance(c, Image) and n in example}
    return {
        name: Image(shapes[name]) if name in shapes and len(shapes[name]) == 3 else column
        for name, column in chosen.items()
    }


def _field(name: str, column: Column, set_name: str, config: Data) -> Field:
    """What the task knows of a field: from its column, and from `config.num_classes` where that does not say."""
    known: Any = getattr(column, "num_classes", 0)
    num_classes = config.num_classes or known
    if name == "image":
        return column if isinstance(column, Image) else Image((None, None, 3))
    if not num_classes:
        raise UsageError(
            f"data set '{set_name}' does not say how many classes its {name} has ({column}); write --data.num_classes N"
        )
    if name == "mask":
        return Mask(getattr(column, "shape", (None, None))[:2], num_classes)
    return Label(num_classes)
