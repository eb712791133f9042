"""Mixes several data sets into one training set, after a check that their fields and classes agree."""

import contextlib
import dataclasses
import itertools
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.example_reader import batch_fields, reader
from mpjax.data.examples import Portion, Source
from mpjax.data.fields import Field, Image, Label, Mask
from mpjax.data.read import Split, SplitOfOne
from mpjax.data.stacking import Arrays, stacked
from mpjax.errors import DataWarning, UsageError


@contextlib.contextmanager
def named(name: str, config: Data) -> Iterator[None]:
    """Context manager that adds `name`, a set of a mixture, to a UsageError raised inside its `with` block.

    The block opens the set. If `name` is in `config.mix`, a proposal in the error for another `data.name` becomes one
    for `data.mix`. Any other `repair` (the settings that would avoid the error) is dropped, because settings apply to
    all sets, and the first set was opened with the present ones.

    Raises:
      UsageError: the error of the block, with the name of the set and the adapted repair. Other errors pass unchanged.
    """
    try:
        yield
    except UsageError as error:
        text, repair = str(error), error.repair
        if name in config.mix:
            text = f"'{name}' of --data.mix: {_of_mix(text, name, config, repair)}"
            if repair.keys() - {"data.name"}:
                text += f"; settings of --data are for all sets, and '{config.name}' can be opened with those given: "
                text += _instead(repair)
            repair = {"data.mix": _other_name(name, repair["data.name"], config)} if "data.name" in repair else {}
        else:
            text = text if f"'{name}'" in text else f"'{name}' of --data.name: {text}"
            if repair.get("data.header"):
                text += "; it is for all sets of --data.mix: if others have a line of names, " + _instead(repair)
        raise UsageError(text, repair=repair) from error


def _of_mix(text: str, name: str, config: Data, repair: Mapping[str, Any]) -> str:
    """Replaces `--data.name OTHER` in a message by `--data.mix` with all names and shares, `name` replaced by OTHER."""

    def renamed(match: re.Match) -> str:
        fractions = _other_name(name, match[1], config)
        return shlex.join(
            ["--data.mix", *(word for other, fraction in fractions.items() for word in (other, str(fraction)))]
        )

    pattern = re.escape(repair["data.name"]) if "data.name" in repair else r"[^\s,;]+"
    return re.sub(f"--data\\.name ({pattern})", renamed, text)


def _other_name(name: str, other: str, config: Data) -> dict[str, float]:
    return {other if known == name else known: fraction for known, fraction in config.mix.items()}


def _instead(repair: Mapping[str, Any]) -> str:
    alternative = "or open it by a function of your own (docs/data.md: several sets in one run)"
    if "data.header" not in repair:
        return f"change its files, {alternative}"
    change = "give this file a line of names" if repair["data.header"] else "drop the first line of this file"
    return f"{change} instead, {alternative}"


def mixed(first: Source, others: Sequence[Portion], config: Data) -> Source:
    """Builds a copy of `first` whose training examples are mixed with the sets `others`, each with its share.

    Only the first training example of each set is read here. The test examples are the test examples of `first` alone.
    The notes of all sets are kept.

    Raises:
      UsageError: a set differs from the first in fields, shapes, dtypes or classes; the message describes the field
        in both sets. Or only one of the two names its classes, and `config.num_classes` is not set. If it is set, a
        DataWarning says that the numbers are taken for the same classes.
    """
    for other in others:
        _require_agreement(first, other.source, config)
    notes = [note for source in (first, *(other.source for other in others)) for note in source.notes]
    return dataclasses.replace(first, mix=tuple(others), notes=tuple(notes))


def _require_agreement(first: Source, other: Source, config: Data) -> None:
    expected, actual = batch_fields(first, config), batch_fields(other, config)
    if expected.keys() != actual.keys():
        raise UsageError(
            f"'{other.name}' of --data.mix: its fields are {', '.join(actual)}, those of '{first.name}' are "
            f"{', '.join(expected)}; wanted the same fields; rename or choose columns in a data set of your own"
        )
    for name, field in expected.items():
        other_field = actual[name]
        if isinstance(field, Label) and isinstance(other_field, Label):
            _require_names(name, field, other_field, first, other)
        if field != other_field:
            raise _differs(name, str(other_field), str(field), first, other, _advice(name, field, other_field))
        if isinstance(field, Label) and isinstance(other_field, Label) and bool(field.names) != bool(other_field.names):
            called, plain = (first, other) if field.names else (other, first)
            _tell_names(field.names or other_field.names, called.name, plain.name, other.name, config)
    splits = (SplitOfOne(source.train, reader(source, config, training=True)) for source in (first, other))
    dtypes = [{name: value.dtype for name, value in split.first.items()} for split in splits]
    for name, dtype in dtypes[0].items():
        if dtype != dtypes[1][name]:
            advice = (
                "uint8 is scaled to [0, 1] on the device and float32 is not: let --data.preprocess return one dtype"
            )
            raise _differs(name, str(dtypes[1][name]), str(dtype), first, other, advice)


def _require_names(name: str, wanted: Label, other_label: Label, first: Source, other: Source) -> None:
    """Raises UsageError if both sets name their classes, and the names or their order differ.

    `wanted` is the label field of `first`, `other_label` that of `other`; `name` is the name of the field.
    """
    if not (wanted.names and other_label.names) or wanted.names == other_label.names:
        return
    pairs = enumerate(itertools.zip_longest(other_label.names, wanted.names))
    number, names = next((number, pair) for number, pair in pairs if len(set(pair)) > 1)
    actual, expected = (
        f"without a class {number}" if called is None else f"'{called}' as class {number}" for called in names
    )
    advice = "a number has to mean one class in all sets: give them the same class names, in the same order"
    raise _differs(name, actual, expected, first, other, advice)


def _tell_names(names: Sequence[str], called: str, plain: str, other: str, config: Data) -> None:
    """Warns that the class numbers of `plain`, a set without class names, are read as the classes of the set `called`.

    Nothing happens if the class names are `0`, `1` and so on, equal to their numbers.

    Args:
      names: the class names of the set `called`.
      called: the name of the set that names its classes.
      plain: the name of the set without class names.
      other: the set in `--data.mix`, which is `called` or `plain`.
      config: the settings.

    Raises:
      UsageError: `config.num_classes` is not set. To set it confirms that the numbers mean the same classes.
    """
    if list(names) == [str(number) for number in range(len(names))]:
        return  # the names are the numbers, as in digits
    shown = ", ".join(f"{number} = {name}" for number, name in enumerate(names[:8]))
    besides = f" and {len(names) - 8} more" if len(names) > 8 else ""
    assumption = f"class numbers of '{plain}', which have no names, are taken for those of '{called}': {shown}"
    if config.num_classes:
        warnings.warn(f"--data.mix: {assumption}{besides}", DataWarning, stacklevel=2)
        return
    raise UsageError(
        f"'{other}' of --data.mix: {assumption}{besides}; if they mean that, write --data.num_classes {len(names)}; if "
        f"not, give '{plain}' the same class names, or let --data.preprocess number the classes of all sets"
    )


def _differs(name: str, actual: str, wanted: str, first: Source, other: Source, advice: str) -> UsageError:
    return UsageError(
        f"'{other.name}' of --data.mix: its {name} is {actual}, that of '{first.name}' is {wanted}; {advice}"
    )


def _advice(name: str, wanted: Field, actual: Field) -> str:
    if isinstance(wanted, Image) and isinstance(actual, Image) and wanted.shape[2] == actual.shape[2]:
        size = max(filter(None, wanted.shape[:2]), default=224)
        return f"write --data.image_size {size} to resize the images of all sets"
    if isinstance(wanted, Label | Mask) and isinstance(actual, Label | Mask):
        largest = max(wanted.num_classes, actual.num_classes)
        return (
            f"if their class numbers mean the same, write --data.num_classes {largest} for all sets; if not, let "
            "--data.preprocess return class numbers that do"
        )
    return f"wanted the same {name} in all sets; let --data.preprocess return it"


@dataclasses.dataclass(frozen=True, eq=False)
class MixedSplit:
    """The `Split` of several data sets. Examples are numbered from 0 through the first set, then through the next."""

    splits: Sequence[SplitOfOne]

    def __len__(self) -> int:
        return sum(map(len, self.splits))

    @property
    def first(self) -> Arrays:
        """The first example of the first set, as a batch of one; it is read once and cached."""
        return self.splits[0].first

    def batch(self, indices: Sequence[int] | np.ndarray, drawn: np.ndarray | None = None) -> Arrays:
        """Reads the examples at `indices` from their sets as one batch [B, ...], in the order of `indices`.

        `drawn` has the random numbers of each example's crop (`draws`). If it is None, `Reader.batch` takes numbers
        from a fixed seed for each set. Error messages name an example by its set and its number in that set.
        """
        ends = np.cumsum([len(split) for split in self.splits])
        numbers = np.asarray(indices)
        owners = np.searchsorted(ends, numbers, side="right")
        rows: list[Arrays] = [{}] * len(numbers)
        for owner, split in enumerate(self.splits):
            positions = np.flatnonzero(owners == owner)
            if not positions.size:
                continue
            local = numbers[positions] - (ends[owner] - len(split))
            arrays = split.batch(local, None if drawn is None else drawn[positions])
            for row, position in enumerate(positions.tolist()):
                rows[position] = {name: values[row] for name, values in arrays.items()}
        return {name: stacked([row[name] for row in rows]) for name in self.first}


def mixed_split(source: Source, config: Data) -> Split:
    """Builds the `Split` of the training examples of `source` and the sets of its mixture, without reading them.

    Each set is read as it would be alone.

    Raises:
      UsageError: see `reader`.
    """
    return MixedSplit([SplitOfOne(member.train, reader(member, config, training=True)) for member in source.trained_on])
