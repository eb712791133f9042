"""Finds what each column of a table becomes, and by which statistics and categories, from the training split alone."""

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.cell_values import (
    advice_on,
    category_of,
    in_order,
    looks_like_number,
    numbers_of,
    parsed,
    repair_of,
    texts_of,
)
from mpjax.data.cells import Cells, quoted
from mpjax.data.column_statistics import moments_of, target_moments
from mpjax.data.encoding import Categories, Encoding, NumericColumn, settings_of
from mpjax.data.target_cells import class_texts, target_numbers
from mpjax.errors import UsageError


def fitted(train: Cells, targets: Sequence[str], task: str, config: Data) -> tuple[Encoding, list[str]]:
    """Chooses what each column becomes from the cells of the training split; also returns notes for the user.

    Columns of numbers are standardised, others are categories. Columns that are constant, count the rows or have no
    name are left out.

    Raises:
      UsageError: a column looks like an id, mixes numbers and words, or has numbers in a form that has to be stated; no
        column is left; or a target does not suit the task.
    """
    columns: list[NumericColumn | Categories] = []
    left_out: dict[str, list[str]] = {"constant": [], "counting": [], "unnamed": [], "id": []}
    for name in train.columns:
        if name in targets:
            continue
        column = _column_of(name, train, config)
        if isinstance(column, str):
            left_out[column].append(name)
        else:
            columns.append(column)
    if ids := left_out.pop("id"):
        raise UsageError(
            f"most of the {len(train)} training rows have a text of their own in {quoted(ids)}, as in an id or free "
            f"text, from which nothing can be learnt for other rows; write --data.drop {' '.join(ids)}, or "
            f"--data.categories {' '.join(ids)} if these are categories",
            repair={"data.drop": (*config.drop, *ids)},
        )
    if not columns:
        raise UsageError(
            "no column is left as an input: all are targets, dropped, constant, nameless or count the rows"
        )
    classes, mean, std = _of_targets(train, targets, task, config)
    encoding = Encoding(
        columns=tuple(columns),
        constant=tuple(itertools.chain(*left_out.values())),
        task=task,
        targets=tuple(targets),
        classes=classes,
        mean=mean,
        std=std,
        settings=settings_of(config),
    )
    return encoding, [*_told(encoding, **left_out)]


_INDEX = re.compile(r"(__index_level_\d+__)?")
"""The names of an index without a name: what pandas writes to parquet, and to csv."""


def _column_of(name: str, train: Cells, config: Data) -> NumericColumn | Categories | str:
    """Chooses what a column becomes; "constant", "counting", "unnamed" or "id" if it is not to be an input."""
    column = train.columns[name]
    if _INDEX.fullmatch(name) and name not in config.categories:
        return "unnamed"  # where a row stood in a file before it was filtered or split tells what it was sorted by
    if name in config.categories:
        return _categories_or_constant(name, in_order(map(category_of, texts_of(column))))
    if not isinstance(column, np.ndarray):
        numbers = parsed(column, config)
        if others := [at for at, number in enumerate(numbers) if number is None]:
            count = sum(number is not None and not np.isnan(number) for number in numbers)
            return _categories_of(name, column, others, count, train)
    values = numbers_of(train, name, config)
    present = values[~np.isnan(values)]
    marked = len(present) < len(values)
    if not len(present):
        return "constant"
    alike = present.min() == present.max()
    if alike and not marked:
        return "constant"
    if not marked and _counts_rows(present, train):
        return "counting"
    if alike:
        return NumericColumn(name, float(present[0]), 1.0, marked)  # only its gaps vary
    return NumericColumn(name, *moments_of(f"column '{name}'", present), marked)


def _categories_of(name: str, column: list[str], others: Sequence[int], numbers: int, train: Cells) -> Categories | str:
    """Makes categories of a column of text, of whose cells `others` are no numbers, and `numbers` are."""
    first, otherwise = column[others[0]], f"if all are categories, write --data.categories {name}"
    if len(others) < numbers:
        raise UsageError(
            f"column '{name}' has {numbers} numbers, but {first!r} in {train.place(others[0])}; "
            f"{advice_on(first)}; {otherwise}"
        )
    if all(looks_like_number(column[at]) for at in others):
        raise UsageError(
            f"column '{name}' has {first!r} in {train.place(others[0])}; {advice_on(first)}; {otherwise}",
            repair=repair_of(first),
        )
    values = in_order(map(category_of, column))
    if len(values) >= 10 and 2 * len(values) > len(column):
        return "id"
    return _categories_or_constant(name, values)


def _categories_or_constant(name: str, values: tuple[str, ...]) -> Categories | str:
    return Categories(name, values) if len(values) > 1 else "constant"


def _counts_rows(values: np.ndarray, train: Cells) -> bool:
    """True if the numbers of a column are those of the rows of its file, up to a constant."""
    return len(values) >= 10 and len(set(train.files)) == 1 and np.ptp(values - train.rows) == 0


def _of_targets(
    train: Cells, targets: Sequence[str], task: str, config: Data
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Finds the classes of a classification, or the mean and deviation of each target of a regression."""
    if task == "regression":
        return (), *target_moments(targets, [target_numbers(train, name, config) for name in targets], "rows")
    if task == "multilabel":
        return (), (), ()
    classes = in_order(class_texts(train, targets[0], config))
    if len(classes) == 1:
        raise UsageError(f"label '{targets[0]}' is {classes[0]!r} in all training rows: there is nothing to learn")
    return classes, (), ()


def _told(
    encoding: Encoding, constant: Sequence[str], counting: Sequence[str], unnamed: Sequence[str]
) -> Iterator[str]:
    numbers = [column for column in encoding.columns if isinstance(column, NumericColumn)]
    categories = [column for column in encoding.columns if isinstance(column, Categories)]
    parts = []
    if numbers:
        parts.append(f"{len(numbers)} columns of numbers, standardised by the training split")
    if categories:
        counts = ", ".join(f"{column.name} ({len(column.values)})" for column in categories)
        parts.append(f"{len(categories)} of categories, an input of 0 and 1 for each: {counts}")
    yield f"{len(encoding.inputs)} inputs of {' and '.join(parts)}; predicted: {', '.join(encoding.targets)}"
    if marked := [column.name for column in numbers if column.marked]:
        yield f"missing numbers become the mean, and an input says that they are missing: {', '.join(marked)}"
    if constant:
        yield f"left out, since they are the same in all training rows: {', '.join(constant)}"
    if counting:
        yield f"left out, since they count the rows: {', '.join(counting)}"
    if unnamed:
        yield (
            f"left out, since it has no name, as the index that pandas writes: {quoted(unnamed)}; to have it as an "
            "input, give it one"
        )
    if encoding.mean:
        yield encoding.told_targets
