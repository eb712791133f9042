"""What the columns of a training split become, stored as JSON with a run and used for all other rows and examples."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from mpjax import strict_json
from mpjax.config.schema import Data
from mpjax.errors import UsageError


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
