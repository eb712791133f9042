"""What the columns of a training split become, stored as JSON with a run and used for all other rows and examples."""

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax import strict_json
from mpjax.config.schema import Data
from mpjax.data.cells import Cells, Column
from mpjax.errors import DataWarning, UsageError


@dataclasses.dataclass(frozen=True)
class NumericColumn:
    """A column of numbers, which becomes (number - mean) / std; where there is none, 0, the mean.

    Attributes:
      name: the name of the column.
      mean: the mean of the training split, in float64.
      std: its standard deviation, positive.
      marked: whether a second input is 1 where the number is missing, because some of the training split are.
    """

    name: str
    mean: float
    std: float
    marked: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return (self.name, f"{self.name} is missing") if self.marked else (self.name,)


@dataclasses.dataclass(frozen=True)
class Categories:
    """A column of categories, which becomes an input of 0 and 1 for each; all are 0 for a category not among them.

    Attributes:
      name: the name of the column.
      values: the categories of the training split in sorted order; the empty text is an empty cell.
    """

    name: str
    values: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(f"{self.name} = {value}" for value in self.values)


_READ_BY = ("targets", "drop", "categories", "missing", "decimal")
"""The settings that decide what a cell becomes."""


@dataclasses.dataclass(frozen=True)
class Encoding:
    """What the columns of a table become.

    Attributes:
      columns: the columns that are inputs, in order.
      constant: the columns whose cells are all alike in the training split, those that count the rows, and those
        without a name.
      task: the task of the run.
      targets: the columns to predict.
      classes: the names of the classes, in the order of their numbers; empty but for classification.
      mean: the mean of each target of a regression over the training split; empty for other tasks.
      std: their standard deviations.
      settings: the settings that decide what a cell becomes, by name.
    """

    columns: tuple[NumericColumn | Categories, ...]
    constant: tuple[str, ...]
    task: str
    targets: tuple[str, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    settings: Mapping[str, Any]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs of a model."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def told_targets(self) -> str:
        """The sentence for the user on the statistics of the targets of a regression."""
        shown = (
            f"{name}: mean {mean:.6g}, deviation {std:.6g}"
            for name, mean, std in zip(self.targets, self.mean, self.std, strict=True)
        )
        return f"targets are standardised for the loss; metrics and predictions are in their units ({'; '.join(shown)})"

    def to_json(self) -> bytes:
        """The encoding as a JSON object, whose numbers are read back bit for bit."""
        return (strict_json.encode(dataclasses.asdict(self), indent=1) + "\n").encode()

    @staticmethod
    def from_json(text: bytes, name: str) -> "Encoding":
        """Reads what `to_json` wrote. Raises UsageError, with the `name` of the file, if it is something else."""
        try:
            stored = json.loads(text)
            columns = tuple(map(_stored_column, stored["columns"]))
            lists = {key: tuple(stored[key]) for key in ("constant", "targets", "classes", "mean", "std")}
            return Encoding(columns=columns, task=stored["task"], settings=stored["settings"], **lists)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{name} is damaged ({error}): it has the statistics of a run's columns") from error


def _stored_column(stored: Mapping[str, Any]) -> NumericColumn | Categories:
    if "values" in stored:
        return Categories(stored["name"], tuple(stored["values"]))
    return NumericColumn(stored["name"], stored["mean"], stored["std"], stored["marked"])


def settings_of(config: Data) -> dict[str, Any]:
    """The settings that decide what a cell becomes, as JSON has them."""
    return {name: list(v) if isinstance(v := getattr(config, name), tuple) else v for name in _READ_BY}


def require_settings(stored: Encoding, task: str, config: Data) -> None:
    """Raises UsageError if a run's columns were encoded for another task or under other settings than those now."""
    if stored.task != task:
        raise UsageError(f"--task {task}: the run began with {stored.task}; start a new one for another task")
    for name, now in settings_of(config).items():
        if now != (before := stored.settings.get(name)):
            raise UsageError(
                f"--data.{name} {_words(now)}: the run began with {_words(before) or 'none'}, which its statistics are "
                "of; leave it out, or start a new run"
            )


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SEPARATED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?|[+-]?\d{1,3}(\.\d{3})+(,\d*)?|[+-]?\d*[,]\d+")
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}


def _missing_words(config: Data) -> set[str]:
    """The words that mean a missing number, in lower case."""
    return _MISSING | {word.lower() for word in config.missing}


def parser(config: Data) -> Callable[[str], float | None]:
    """Builds the function from a cell to its number, float64: NaN if it is missing, None if the cell is no number."""
    missing = _missing_words(config)
    thousands = {".": ",", ",": ".", "": ""}[config.decimal]
    # No thousands begin with 0: 0,125 is a fraction in another way of writing.
    grouped = re.compile(rf"[+-]?[1-9]\d{{0,2}}({re.escape(thousands)}\d{{3}})+(?!\d)") if thousands else None

    def number(cell: str) -> float | None:
        if cell.lower() in missing:
            return np.nan
        if grouped:
            if thousands in cell:
                if not (groups := grouped.match(cell)) or thousands in cell[groups.end() :]:
                    return None
                cell = cell.replace(thousands, "")
            if config.decimal == ",":
                cell = cell.replace(",", ".") if "." not in cell else "-"
        return float(cell) if _NUMBER.fullmatch(cell) else None

    return number


def _repair(cell: str) -> dict[str, str]:
    """The setting with which a cell is a number, if only one of the two can be meant: 3,14 is never thousands."""
    return {"data.decimal": ","} if re.fullmatch(r"[+-]?(\d*,(\d{1,2}|\d{4,})|0?,\d+)", cell) else {}


def is_of_numbers(column: Column, config: Data) -> bool:
    """True if all cells of a column are numbers or missing."""
    return isinstance(column, np.ndarray) or None not in map(parser(config), column)


def numbers_of(cells: Cells, name: str, config: Data) -> np.ndarray:
    """Reads a column as numbers, float64 [N], NaN where one is missing.

    Raises:
      UsageError: a cell is no number, or no finite one in float64; the message names its row.
    """
    column = cells.columns[name]
    if not isinstance(column, np.ndarray):
        parse = parser(config)
        parsed = [parse(cell) for cell in column]
        if None in parsed:
            at = parsed.index(None)
            raise UsageError(
                f"column '{name}' has {column[at]!r} in {cells.place(at)}; {_advice(column[at])}",
                repair=_repair(column[at]),
            )
        column = np.asarray(parsed, np.float64)
    if stated := [float(word) for word in config.missing if _NUMBER.fullmatch(word)]:
        column = np.where(np.isin(column, stated), np.nan, column)  # -999 is also -999.0, and stored as a number
    if (infinite := np.flatnonzero(np.isinf(column))).size:
        raise UsageError(f"column '{name}' is infinite in {cells.place(int(infinite[0]))}; wanted finite numbers")
    return column


def _advice(cell: str) -> str:
    if _SEPARATED.fullmatch(cell):
        return (
            "wanted a number such as 1234.5; if its decimal sign is a point and commas separate thousands, write "
            "--data.decimal . and if it is a comma, --data.decimal ,"
        )
    if _NUMBER.fullmatch(cell):  # only with --data.decimal ,
        return "wanted a number whose decimal sign is a comma, as --data.decimal , says; write one sign in all columns"
    return f"wanted a number; if it means a missing one, write --data.missing {cell!r}; repair it otherwise"


def texts_of(column: Column) -> list[str]:
    """The cells of a column as texts: a stored whole number without a fraction, a missing one as an empty text."""
    if not isinstance(column, np.ndarray):
        return column
    return ["" if np.isnan(x) else str(int(x)) if float(x).is_integer() else repr(float(x)) for x in column]


def _category(text: str) -> str:
    """The category of a cell: 1.0 and 1e0 are 1, as where numbers are stored; 01 and 1.10 are what they say."""
    if not _NUMBER.fullmatch(text) or not {*text} & {*".eE"} or not abs(number := float(text)) < 2**53:
        return text
    return str(int(number)) if number.is_integer() else text


def fitted(train: Cells, targets: Sequence[str], task: str, config: Data) -> tuple[Encoding, list[str]]:
    """Chooses what each column becomes from the cells of the training split; also returns notes for the user.

    Columns of numbers are standardised, others are categories. Columns that are constant, count the rows or have no
    name are left out.

    Raises:
      UsageError: a column looks like an id, mixes numbers and words, or has numbers in a form that has to be stated; no
        column is left; or a target does not suit the task.
    """
    columns, constant, ids = [], [], []
    counting, indices = [], []
    for name in train.columns:
        if name in targets:
            continue
        column = _column_of(name, train, config)
        if isinstance(column, str):
            {"constant": constant, "id": ids, "counts": counting, "index": indices}[column].append(name)
        else:
            columns.append(column)
    if ids:
        raise UsageError(
            f"most of the {len(train)} training rows have a text of their own in {_quoted(ids)}, as in an id or free "
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
        tuple(columns),
        (*constant, *counting, *indices),
        task,
        tuple(targets),
        classes,
        mean,
        std,
        settings_of(config),
    )
    return encoding, [*_told(encoding, train, constant, counting, indices)]


_INDEX = re.compile(r"(__index_level_\d+__)?")
"""The names of an index without a name: what pandas writes to parquet, and to csv."""


def _column_of(name: str, train: Cells, config: Data) -> NumericColumn | Categories | str:
    """Chooses what a column becomes; "constant", "counts", "index" or "id" if it is not to be an input."""
    column = train.columns[name]
    if _INDEX.fullmatch(name) and name not in config.categories:
        return "index"  # where a row stood in a file before it was filtered or split tells what it was sorted by
    if name in config.categories:
        values = tuple(sorted(set(map(_category, texts_of(column))), key=_in_order))
        return Categories(name, values) if len(values) > 1 else "constant"
    if not isinstance(column, np.ndarray):
        parse = parser(config)
        parsed = [parse(cell) for cell in column]
        others = [at for at, value in enumerate(parsed) if value is None]
        if others:
            numbers = sum(value is not None and not np.isnan(value) for value in parsed)
            return _categories_of(name, column, others, numbers, train)
    values = numbers_of(train, name, config)
    present = values[~np.isnan(values)]
    marked = len(present) < len(values)
    if not len(present) or (present.min() == present.max() and not marked):
        return "constant"
    if not marked and _counts_rows(present, train):
        return "counts"
    if present.min() == present.max():
        return NumericColumn(name, float(present[0]), 1.0, marked)  # only its gaps vary
    return NumericColumn(name, *moments_of(f"column '{name}'", present), marked)


def moments_of(called: str, numbers: np.ndarray) -> tuple[float, float]:
    """Computes the mean and the standard deviation of numbers [N], not all alike, by which they are standardised.

    Raises:
      UsageError: float64 does not hold the deviation, whose square is computed: numbers of 1e155 or of 1e-163.
    """
    with np.errstate(over="ignore", under="ignore"):
        mean, std = float(numbers.mean()), float(numbers.std())
    if not (np.isfinite(mean) and np.isfinite(std) and std > 0):
        raise UsageError(
            f"{called}: its numbers, from {numbers.min():g} to {numbers.max():g}, have a mean of {mean:g} and a "
            f"deviation of {std:g} in float64, by which none can be standardised; store them in another unit"
        )
    return mean, std


def _categories_of(name: str, column: list[str], others: Sequence[int], numbers: int, train: Cells) -> Categories | str:
    """Makes categories of a column of text, of whose cells `others` are no numbers, and `numbers` are."""
    first = column[others[0]]
    if len(others) < numbers:
        raise UsageError(
            f"column '{name}' has {numbers} numbers, but {first!r} in {train.place(others[0])}; "
            f"{_advice(first)}; if all are categories, write --data.categories {name}"
        )
    if all(_SEPARATED.fullmatch(column[at]) or _NUMBER.fullmatch(column[at]) for at in others):
        raise UsageError(
            f"column '{name}' has {first!r} in {train.place(others[0])}; {_advice(first)}; if all are categories, "
            f"write --data.categories {name}",
            repair=_repair(first),
        )
    values = sorted(set(map(_category, column)), key=_in_order)
    if len(values) >= 10 and 2 * len(values) > len(column):
        return "id"
    return Categories(name, tuple(values)) if len(values) > 1 else "constant"


def _counts_rows(values: np.ndarray, train: Cells) -> bool:
    """True if the numbers of a column are those of the rows of its file, up to a constant."""
    return len(values) >= 10 and len(set(train.files)) == 1 and np.ptp(values - train.rows) == 0


def _in_order(text: str) -> tuple[int, float, str]:
    """Sorts numbers by value, and behind them texts."""
    return (0, float(text), text) if _NUMBER.fullmatch(text) else (1, 0.0, text)


def _of_targets(
    train: Cells, targets: Sequence[str], task: str, config: Data
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Finds the classes of a classification, or the mean and deviation of each target of a regression."""
    if task == "regression":
        values = [target_numbers(train, name, config) for name in targets]
        for name, numbers in zip(targets, values, strict=True):
            if numbers.min() == numbers.max():
                raise UsageError(f"target '{name}' is {numbers[0]} in all training rows: there is nothing to learn")
        moments = [moments_of(f"target '{name}'", numbers) for name, numbers in zip(targets, values, strict=True)]
        return (), tuple(mean for mean, _ in moments), tuple(std for _, std in moments)
    if task == "multilabel":
        return (), (), ()
    labels = class_texts(train, targets[0], config)
    classes = tuple(sorted(set(labels), key=_in_order))
    if len(classes) == 1:
        raise UsageError(f"label '{targets[0]}' is {classes[0]!r} in all training rows: there is nothing to learn")
    return classes, (), ()


def class_texts(cells: Cells, name: str, config: Data) -> list[str]:
    """Reads the label of each row as text: 1, 1.0 and 1e0 are one class.

    Raises:
      UsageError: a label is missing, which NA and the like mean beside whole numbers alone, or is a number with a
        fraction.
    """
    texts = texts_of(cells.columns[name])
    words = _missing_words(config) - {""}
    absent = [at for at, text in enumerate(texts) if text.lower() in words and not _NUMBER.fullmatch(text)]
    others = {*texts} - {texts[at] for at in absent} - {""}
    if absent and others and all(map(_NUMBER.fullmatch, others)):
        raise UsageError(
            f"label '{name}' is {texts[absent[0]]!r} in {cells.place(absent[0])}, and a number in others, so that it "
            f"means a missing one, in {len(absent)} of {len(texts)} rows: drop these rows from the file, or give the "
            "class another name if it is one"
        )
    if "" in texts:
        raise UsageError(
            f"label '{name}' is empty in {cells.place(texts.index(''))}, {texts.count('')} of {len(texts)} rows; "
            "wanted a class in every row: drop these rows from the file"
        )
    if not all(map(_NUMBER.fullmatch, texts)) or not any(map(set("." + "eE").intersection, texts)):
        return list(texts)
    fractions = [at for at, text in enumerate(texts) if not float(text).is_integer()]
    if fractions:
        raise UsageError(
            f"label '{name}' is {texts[fractions[0]]} in {cells.place(fractions[0])}, which is no class; to predict "
            "numbers write --task regression",
            repair={"task": "regression"},
        )
    return [str(int(float(text))) for text in texts]


def target_numbers(cells: Cells, name: str, config: Data) -> np.ndarray:
    """Reads a target of a regression, float64 [N].

    Raises:
      UsageError: a cell is empty or no number.
    """
    try:
        values = numbers_of(cells, name, config)
    except UsageError as error:
        raise UsageError(
            f"--task regression: {error}; if '{name}' has classes, write --task classification", repair=error.repair
        ) from error
    if (missing := np.flatnonzero(np.isnan(values))).size:
        raise UsageError(
            f"target '{name}' is missing in {cells.place(int(missing[0]))}, {missing.size} of {len(values)} rows; "
            "wanted a number in every row: drop these rows from the file"
        )
    return values


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _told(
    encoding: Encoding, train: Cells, constant: Sequence[str], counting: Sequence[str], indices: Sequence[str]
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
    if indices:
        yield (
            f"left out, since it has no name, as the index that pandas writes: {_quoted(indices)}; to have it as an "
            "input, give it one"
        )
    if encoding.mean:
        yield encoding.told_targets


def require_inputs(encoding: Encoding, cells: Cells, called: str) -> None:
    """Raises UsageError if rows, called `called`, lack a column that is an input."""
    if missing := [column.name for column in encoding.columns if column.name not in cells.columns]:
        there = [column.name for column in encoding.columns if column.name in cells.columns]
        raise UsageError(
            f"{called}: there is no column {_quoted(missing)}, which the model takes; of its columns there are "
            f"{_quoted(there) or 'none'}"
        )


def encoded(encoding: Encoding, cells: Cells, config: Data, called: str) -> np.ndarray:
    """Computes the inputs of rows, float32 [N, F], from the statistics of the training split.

    Args:
      encoding: what each column becomes.
      cells: the rows, with all columns of the encoding.
      config: how numbers are written.
      called: the name of the rows, for warnings.

    Warns:
      DataWarning: rows have categories that no training row had, or lack numbers that no training row lacked.

    Raises:
      UsageError: a column is missing, a cell of a column of numbers is none, or a number is infinite in float32.
    """
    require_inputs(encoding, cells, called)
    blocks = []
    for column in encoding.columns:
        if isinstance(column, Categories):
            texts = texts_of(cells.columns[column.name])
            numbers = {value: at for at, value in enumerate(column.values)}
            places = np.asarray([numbers.get(text, numbers.get(_category(text), -1)) for text in texts])
            if unseen := sorted({text for text, at in zip(texts, places, strict=True) if at < 0}):
                _warn(
                    f"{called}: column '{column.name}' has {', '.join(map(repr, unseen[:5]))} in "
                    f"{np.count_nonzero(places < 0)} of {len(texts)} rows, which no training row has: all its inputs "
                    "are 0 there"
                )
            blocks.append(np.equal(places[:, None], np.arange(len(column.values))).astype(np.float32))
            continue
        values = numbers_of(cells, column.name, config)
        absent = np.isnan(values)
        if absent.any() and not column.marked:
            _warn(
                f"{called}: column '{column.name}' is missing in {np.count_nonzero(absent)} of {len(values)} rows, and "
                f"in no training row: it is taken for the mean, {column.mean:.6g}"
            )
        with np.errstate(over="ignore"):
            scaled = ((np.where(absent, column.mean, values) - column.mean) / column.std).astype(np.float32)
        if (infinite := np.flatnonzero(np.isinf(scaled))).size:
            at = int(infinite[0])
            raise UsageError(
                f"column '{column.name}' is {values[at]:g} in {cells.place(at)}, too far from the mean of the training "
                f"split, {column.mean:g}, with a deviation of {column.std:g}"
            )
        blocks.append(np.stack([scaled, absent], 1).astype(np.float32) if column.marked else scaled[:, None])
    return np.concatenate(blocks, axis=1)


def _warn(text: str) -> None:
    warnings.warn(text, DataWarning, stacklevel=3)
