"""Describes a stored data set by its columns and splits, and chooses the column of each field of a task."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from mpjax.config.choices import TABULAR
from mpjax.config.schema import Data
from mpjax.config.tasks import TASKS
from mpjax.data.examples import Examples, require_examples
from mpjax.data.fields import Image, Label, Mask
from mpjax.errors import UsageError, reason_of


@dataclasses.dataclass(frozen=True)
class Text:
    """The type of a column of text, str or UTF-8 bytes."""


@dataclasses.dataclass(frozen=True)
class Other:
    """The type of a column that may hold anything except text, such as numbers of unknown meaning.

    Args:
      described: the type, as the library that stored the column writes it, for messages.
      rank: the number of axes of one value; None if unknown.
    """

    described: str
    rank: int | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        return self.described


Column = Image | Label | Mask | Text | Other


@dataclasses.dataclass(frozen=True)
class Table:
    """A stored data set, of which no examples are opened yet.

    Args:
      name: the name in error messages.
      columns: the type of each column.
      open: a function from column names to the training and the test split. Their examples have only these columns;
        encoded images are bytes.
      preferred: for each field, the column that the data set itself declares.
      labelled: a function from the name of a column of integers, booleans or texts to the same set with class numbers
        in that column, numbered alike in both splits. None: the set cannot number classes.
      notes: messages to the user about what of the stored data is left out.
      places: the file of each test example, if its number in the split does not tell it; else empty.
    """

    name: str
    columns: Mapping[str, Column]
    open: Callable[[Sequence[str]], tuple[Examples, Examples]]
    preferred: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labelled: Callable[[str], "Table"] | None = None
    notes: tuple[str, ...] = ()
    places: Sequence[str] = ()


def require_columns(table: Table, columns: Mapping[str, str]) -> None:
    """Raises UsageError if the values of `columns`, which `--data.columns` names, are not all columns of a data set."""
    if missing := [column for column in columns.values() if column not in table.columns]:
        raise UsageError(f"--data.columns: '{table.name}' has no {missing[0]}; it has {', '.join(table.columns)}")


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
_HELD = {"label": "labelled images", "mask": "masks", "text": "texts"}  # keyed by the field that distinguishes a task


def choose_columns(table: Table, fields: tuple[str, ...], config: Data) -> dict[str, str]:
    """Chooses a column for each of `fields`: by `config.columns`, then as the set declares, then by the usual names.

    If none of them decides, the only column of the field's type is chosen. The result maps each field to its column.
    A column that `config.columns` names is taken whatever its type.

    Raises:
      UsageError: a named column or field does not exist, or not exactly one column fits a field; the message lists
        the columns, the settings to write, and the tasks that the set supports.
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
    tabular = as_rows(table) if field == "image" else ""
    possible = _possible(field, table, candidates)
    chosen = {"data.columns": {**named, field: possible[0]}} if len(possible) == 1 else {}
    raise UsageError(
        f"data set '{table.name}' has {'several columns' if candidates else 'no column'} that could be the {field}, "
        f"{_WANTED[field][1]}; its columns are {shown}"
        + (f"; to learn from these columns write --data.name {tabular}" if tabular else "")
        + _advice_on(field, table, candidates, possible, named),
        repair={"data.name": tabular} if tabular else chosen,
    )


def as_rows(table: Table) -> str:
    """The name of a file of numbers and texts as the rows of a table; empty for other sets."""
    where = table.name.removeprefix("hf:").removeprefix("csv:").removeprefix("tsv:").removeprefix("parquet:")
    scalar = all(
        isinstance(column, Text | Label) or getattr(column, "rank", None) == 0 for column in table.columns.values()
    )
    return f"{TABULAR}{where}" if scalar and where.lower().endswith((".csv", ".tsv", ".parquet")) else ""


def _possible(field: str, table: Table, candidates: Sequence[str]) -> list[str]:
    """Lists the columns that `--data.columns` may choose for a field; a label is no floating-point number."""
    possible = candidates or [name for name, column in table.columns.items() if _can_be(field, column, table)]
    return [name for name in possible if field != "label" or not _is_float(table.columns[name])]


def _advice_on(
    field: str, table: Table, candidates: Sequence[str], possible: Sequence[str], named: Mapping[str, str]
) -> str:
    """Formats advice for a field that no column (`candidates` is empty) or several columns fit.

    It names the columns that `--data.columns` may choose, `possible`, and, if there are no candidates, the tasks that
    the set supports. If there is neither, it proposes a task of the user's own.
    """
    floats = [name for name, column in table.columns.items() if _is_float(column)]
    whole = [name for name in possible if isinstance(table.columns[name], Other)]
    if field == "label" and floats and not candidates and not whole:
        return (
            "; a floating-point number is not a class number: to predict numbers write --task regression "
            f"--data.targets {floats[0]}; {whole_numbers(floats[0])}"
        )
    choice = possible[0] if len(possible) == 1 else f"COLUMN, with {' or '.join(possible)} for COLUMN"
    advice = f"; write --data.columns {field} {choice}" if possible else ""
    label = named.get("label") or next(iter(_candidates("label", table)), "")
    if field == "text" and len(texts := [name for name in possible if name != label]) > 1:
        advice += f", or join several, as in --data.text_template '{' '.join(f'{{{name}}}' for name in texts)}'"
    others = "" if candidates else _other_tasks(field, table)
    if not advice and not others:
        return (
            "; to learn something else from these columns write --task own --training.objective FILE.py:NAME, a "
            "function of your model and a batch of them"
        )
    return advice + others


def whole_numbers(column: str) -> str:
    """Formats advice, with an example function, for using a floating-point column as the label."""
    return (
        f"if the values of '{column}' are whole, write --data.columns label {column} --data.num_classes N "
        "--data.preprocess FILE.py:FUNCTION with\n"
        "  def FUNCTION(example): return {**example, 'label': int(example['label'])}"
    )


def _is_float(column: Column) -> bool:
    return isinstance(column, Other) and not column.rank and "float" in column.described


def _candidates(field: str, table: Table) -> list[str]:
    """Lists the columns that could be the field.

    It is one column if the set declares it or it has a usual name of the field, and its type may hold the field.
    Otherwise it is every column whose type is exactly the field's, or none.
    """
    fitting = [name for name, column in table.columns.items() if _fits(field, column, table)]
    for candidate in (table.preferred.get(field), *_USUAL[field]):
        if candidate in fitting:
            return [candidate]
    return [name for name in fitting if isinstance(table.columns[name], _WANTED[field][0])]


def could_be(field: str, table: Table) -> bool:
    """True if a column of the set has a usual name of the field, or its type."""
    return bool(_candidates(field, table))


def _other_tasks(field: str, table: Table) -> str:
    """Formats advice on the tasks that do not need `field` and for which the set has all columns; empty if none."""
    served: dict[str, list[str]] = {}
    for task, kind in TASKS.items():
        known = not _HELD.keys().isdisjoint(kind.columns) and all(other in _USUAL for other in kind.columns)
        fits = known and all(len(_candidates(other, table)) == 1 for other in kind.columns)
        if fits and field not in kind.columns:
            held = next(_HELD[other] for other in ("text", "mask", "label") if other in kind.columns)
            served.setdefault(held, []).append(f"--task {task}")
    return "".join(f"; for {held} write {' or '.join(tasks)}" for held, tasks in served.items())


def _fits(field: str, column: Column, table: Table) -> bool:
    """True if the type of a column allows it to hold the field.

    An `Other` column may hold anything except text, and no mask if it holds scalars. A text column may hold the label
    if the set can number classes. A gray image may hold a mask; a mask of unknown classes may hold a gray image.
    """
    if field == "label" and isinstance(column, Text):
        return table.labelled is not None
    if field == "mask" and isinstance(column, Image):
        return column.shape[2] == 1
    if field == "text":
        return isinstance(column, Text)
    if field == "mask" and isinstance(column, Other):
        return column.rank != 0
    if field == "image" and isinstance(column, Mask):
        return not column.num_classes  # integers [H, W], which may be a mask or a grayscale image
    return isinstance(column, (_WANTED[field][0], Other))


def _can_be(field: str, column: Column, table: Table) -> bool:
    """True if it makes sense to propose the column for the field in `--data.columns`.

    It is stricter than `_fits` for an `Other` column of known rank: only scalars for a label, only arrays otherwise.
    """
    if isinstance(column, Other) and column.rank is not None:
        # An image has axes. A label has none, unless --data.preprocess reduces several numbers to one.
        return field != "text" and (field == "label") == (column.rank == 0)
    return _fits(field, column, table)


class SplitPart(NamedTuple):
    """The examples of a split from number `start`, counted from 0, up to, but not including, `stop`."""

    split: str
    start: int
    stop: int


def parts_of(expression: str, sizes: Mapping[str, int], set_name: str) -> list[SplitPart]:
    """Resolves a split expression into ranges of the stored splits, in the order of the expression.

    A range may be empty, but not all of them.

    Args:
      expression: in tensorflow-datasets' notation: `train`, `train[:90%]`, `train[100:200]`, `train+test`, `all`.
      sizes: the number of examples of each split.
      set_name: the name of the data set, for messages.

    Raises:
      UsageError: the split does not exist, the expression is invalid, a range ends before it starts, or there are no
        examples. In the first two cases the message lists the splits, and the error may have a `repair`.
    """
    import tensorflow_datasets as tfds

    instruction: Any = tfds.core.ReadInstruction
    infos = {name: SimpleNamespace(num_examples=size) for name, size in sizes.items()}
    try:
        instructions = instruction.from_spec(expression).to_absolute(infos)
    except (ValueError, NotImplementedError) as error:
        names = list(sizes)
        split = names[0] if names else "train"
        held = ", ".join(f"{name} ({size} examples)" for name, size in sizes.items())
        if len(names) == 1 and split not in base_names(expression):
            raise UsageError(
                f"data set '{set_name}' has only the split {held}, not '{expression}'; write --data.train_split "
                f"'{split}[:90%]' --data.test_split '{split}[90%:]'",
                repair={"data.train_split": f"{split}[:90%]", "data.test_split": f"{split}[90%:]"},
            ) from error
        advice, repair = advice_on_splits(expression, names)
        raise UsageError(
            f"split '{expression}' of '{set_name}': {reason_of(error)}; it has {held}; {advice}",
            repair=repair,
        ) from error
    require_ordered_parts(expression, infos)
    return [
        SplitPart(part.splitname, *slice(part.from_, part.to).indices(sizes[part.splitname])[:2])
        for part in instructions
    ]


def require_ordered_parts(expression: str, infos: Mapping[str, Any]) -> None:
    """Raises UsageError if a range of a split expression ends before it starts, or if there are no examples at all.

    tensorflow-datasets counts -2 examples in `train[5:3]`. One range of a sum may be empty, as in a fold of
    `train[:{k}%]+train[{k + 10}%:]`.

    Args:
      expression: a valid expression.
      infos: for each split, an object with `num_examples`, which tensorflow-datasets reads.
    """
    import tensorflow_datasets as tfds

    instruction: Any = tfds.core.ReadInstruction
    total = 0
    for part in map(str.strip, expression.split("+")):
        for span in instruction.from_spec(part).to_absolute(infos):
            start, stop, _ = slice(span.from_, span.to).indices(infos[span.splitname].num_examples)
            if start > stop:
                raise UsageError(
                    f"split '{part}' starts at example {start} and ends before it, at {stop}; write "
                    f"'{span.splitname}[{stop}:{start}]', or leave the part out"
                )
            total += stop - start
    require_examples(expression, total)


_TEST = "test"
_FOR_TEST = ("validation", "val", "valid", "dev", "eval")
"""Usual names of a split that can replace a missing `test` split."""


def advice_on_splits(missing: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Formats advice for the missing split `missing`, and the settings that repair it.

    The settings are empty unless `missing` is `test` and one of the existing splits `names` is a usual name for it.

    >>> advice_on_splits("test", ["train", "val"])
    ('write --data.test_split val to evaluate on it', {'data.test_split': 'val'})
    """
    if missing == _TEST and (fitting := [name for name in _FOR_TEST if name in names]):
        return f"write --data.test_split {fitting[0]} to evaluate on it", {"data.test_split": fitting[0]}
    split = names[0] if names else "train"
    advice = "write --data.train_split or --data.test_split with one of these, or parts of one: "
    return f"{advice}'{split}[:90%]' and '{split}[90%:]'", {}


SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""The words by which names of arrays and files tell their split."""


def base_names(expression: str) -> list[str]:
    """Lists the names of the splits in a split expression, in order, without their ranges; duplicates stay.

    >>> base_names("train+test[:10]")
    ['train', 'test']
    """
    return [name.partition("[")[0].strip() for name in expression.split("+")]
