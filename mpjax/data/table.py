"""A stored data set before it serves a task: its columns, which one serves as which field, and its splits."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from mpjax.config.choices import TASKS
from mpjax.config.schema import Data
from mpjax.data.examples import Examples, require_examples
from mpjax.data.fields import Image, Label, Mask
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Text:
    """A column of text, str or UTF-8 bytes."""


@dataclasses.dataclass(frozen=True)
class Other:
    """A column that does not say what it holds.

    Args:
      described: its type in the words of the library that stored it, for messages.
      rank: how many axes one value has; None: not known.
    """

    described: str
    rank: int | None = dataclasses.field(default=None, repr=False)


Column = Image | Label | Mask | Text | Other


@dataclasses.dataclass(frozen=True)
class Table:
    """A stored data set.

    Args:
      name: what error messages call it.
      columns: what each column holds.
      open: names of columns to both splits, training and test, whose examples have just these columns; encoded images
        are bytes.
      preferred: by field, the column that the data set itself says is meant.
      labelled: from a column of integers or texts to the same set with class numbers in that column, the same ones in
        both splits; None: the set cannot number classes.
    """

    name: str
    columns: Mapping[str, Column]
    open: Callable[[Sequence[str]], tuple[Examples, Examples]]
    preferred: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labelled: Callable[[str], "Table"] | None = None


_USUAL = {
    "image": ("image", "img", "pixels", "picture"),
    "label": ("label", "labels", "target", "class"),
    "mask": ("mask", "segmentation_mask", "annotation", "label"),
    "text": ("text", "sentence", "content", "review"),
}
_WANTED = {
    "image": (Image, "an image [height, width, channels]"),
    "label": (Label, "class numbers"),
    "mask": (Mask, "an image [height, width, 1] of class numbers"),
    "text": (Text, "text"),
}
_HELD = {"label": "labelled images", "mask": "masks", "text": "texts"}  # by the field that sets a task apart


def choose_columns(table: Table, fields: tuple[str, ...], config: Data) -> dict[str, str]:
    """A column for each of `fields`: the one `config.columns` names, else the one the set prefers, else by usual names.

    Raises:
      UsageError: a column that is not there, a field that does not exist, or none or several that would do; the message
        lists the columns and says what to write, and which task the set could serve.
    """
    if unknown := sorted(set(config.columns) - set(fields)):
        raise UsageError(f"--data.columns {unknown[0]}: this task has the fields {', '.join(fields)}")
    return {field: _column_for(field, table, config.columns) for field in fields}


def _column_for(field: str, table: Table, named: Mapping[str, str]) -> str:
    shown = ", ".join(f"{name}: {column}" for name, column in table.columns.items())
    if field in named:
        if named[field] in table.columns:
            return named[field]
        near = difflib.get_close_matches(named[field], table.columns, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"--data.columns {field} {named[field]}: '{table.name}' has {shown}{hint}")
    candidates = _candidates(field, table)
    if len(candidates) == 1:
        return candidates[0]
    floats = [name for name, column in table.columns.items() if _is_float(column)]
    advice = f"write --data.columns {field} COLUMN{'' if candidates else _other_tasks(field, table)}"
    if field == "label" and floats and not candidates:
        advice = f"a floating number is no class number: {whole_numbers(floats[0])}"
    raise UsageError(
        f"data set '{table.name}' has {'several columns' if candidates else 'no column'} that could be the {field}, "
        f"{_WANTED[field][1]}; its columns are {shown}; {advice}"
    )


def whole_numbers(column: str) -> str:
    """What to write where a column of floating numbers is to serve as the label."""
    return (
        f"where those of '{column}' are whole, write --data.columns label {column} --data.num_classes N "
        "--data.preprocess FILE.py:FUNCTION with\n"
        "  def FUNCTION(example): return {**example, 'label': int(example['label'])}"
    )


def _is_float(column: Column) -> bool:
    return isinstance(column, Other) and not column.rank and "float" in column.described


def _candidates(field: str, table: Table) -> list[str]:
    """The columns that could be a field: one where the set's preference, a usual name or the type decides."""
    fitting = [name for name, column in table.columns.items() if _fits(field, column, table)]
    for candidate in (table.preferred.get(field), *_USUAL[field]):
        if candidate in fitting:
            return [candidate]
    return [name for name in fitting if isinstance(table.columns[name], _WANTED[field][0])]


def _other_tasks(field: str, table: Table) -> str:
    """Advice on the tasks without `field` that the set has all columns for."""
    served: dict[str, list[str]] = {}
    for task, kind in TASKS.items():
        if field not in kind.fields and all(len(_candidates(other, table)) == 1 for other in kind.fields):
            held = next(_HELD[other] for other in ("text", "mask", "label") if other in kind.fields)
            served.setdefault(held, []).append(f"--task {task}")
    return "".join(f"; for {held} write {' or '.join(tasks)}" for held, tasks in served.items())


def _fits(field: str, column: Column, table: Table) -> bool:
    """Whether a column may hold a field; one that does not say what it holds may hold anything but text."""
    if field == "label" and isinstance(column, Text):
        return table.labelled is not None
    if field == "mask" and isinstance(column, Image):
        return column.shape[2] == 1
    if field == "text":
        return isinstance(column, Text)
    if field == "mask" and isinstance(column, Other):
        return column.rank != 0
    if field == "image" and isinstance(column, Mask):
        return not column.num_classes  # integers [H, W], of which the type does not say what they are
    return isinstance(column, (_WANTED[field][0], Other))


class Part(NamedTuple):
    """Examples `start` to `stop` (not included) of a split."""

    split: str
    start: int
    stop: int


def parts_of(expression: str, sizes: Mapping[str, int], set_name: str) -> list[Part]:
    """The parts that make up a split, in order.

    Args:
      expression: in tensorflow-datasets' notation: `train`, `train[:90%]`, `train[100:200]`, `train+test`, `all`.
      sizes: examples of each split there is.
      set_name: for messages.

    Raises:
      UsageError: there is no such split, it cannot be read, or it is empty; the message lists what there is.
    """
    import tensorflow_datasets as tfds

    instruction: Any = tfds.core.ReadInstruction
    infos = {name: SimpleNamespace(num_examples=size) for name, size in sizes.items()}
    try:
        found = instruction.from_spec(expression).to_absolute(infos)
    except (ValueError, NotImplementedError) as error:
        names = list(sizes)
        one = names[0] if names else "train"
        raise UsageError(
            f"split '{expression}' of '{set_name}': {str(error).splitlines()[0]}; it has "
            + ", ".join(f"{name} ({size} examples)" for name, size in sizes.items())
            + f"; write --data.train_split or --data.test_split with one of these, or parts of one: '{one}[:90%]' and "
            f"'{one}[90%:]'"
        ) from error
    parts = [Part(part.splitname, *slice(part.from_, part.to).indices(sizes[part.splitname])[:2]) for part in found]
    require_examples(expression, sum(max(part.stop - part.start, 0) for part in parts))
    return parts


def base_names(expression: str) -> list[str]:
    """The splits that an expression is made of: `train+test[:10]` of `train` and `test`."""
    return [name.partition("[")[0].strip() for name in expression.split("+")]
