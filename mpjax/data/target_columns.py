"""Opens a stored data set of images or texts with the numbers or the several labels to predict from each."""

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mpjax.config.schema import Data
from mpjax.config.tasks import TaskName
from mpjax.data.column_statistics import target_moments
from mpjax.data.encoding import Encoding, require_settings, settings_of
from mpjax.data.examples import Example, Examples, MappedExamples, Source, array, renamed
from mpjax.data.fields import Field, Image, Label
from mpjax.data.image_range import in_range
from mpjax.data.table import Table, Text, as_rows, choose_columns, could_be
from mpjax.data.targets import Labels, NumericTarget
from mpjax.data.user_function import PreprocessedExamples, load_preprocess, shape_after
from mpjax.errors import UsageError


_USUAL = {"target": ("target", "targets", "label", "y"), "labels": ("labels", "label", "targets")}
_AT_ONCE = 512  # examples whose targets are read together


def with_targets(table: Table, task: TaskName, config: Data, stored: Encoding | None) -> Source:
    """Opens images or texts with the field `target` (regression) or `labels` (multilabel) of columns of numbers.

    These columns, `config.targets`, hold a number each, or one of them all numbers of an example, [K]. Texts are read
    if the settings name one, or if no column could be an image. A preprocess function gets an example with the image or
    the text and the numbers [K] in the units of the data, and returns both. The numbers of a regression are
    standardised, in float64, by the statistics of `stored`, or else of the training split, which is then read whole:
    only the columns of the numbers, but with a preprocess function the images or texts too.

    Raises:
      UsageError: a column does not exist or holds text, a number of the training split is missing, all numbers of a
        target are alike, `stored` is of other settings, or a file of a text and other columns is to be read, and the
        settings do not say whether as texts or as rows.
    """
    field = "target" if task == "regression" else "labels"
    name = _input_of(table, config)
    (column,) = choose_columns(table, (name,), config).values()
    columns = _columns_for(field, table, config)
    if name == "text":
        _require_choice(table, (column, *columns), config)
    chosen, notes = in_range({name: table.columns[column]}, config, table.name)
    function = load_preprocess(config.preprocess) if config.preprocess else None
    if name == "image" and not isinstance(chosen[name], Image) and not function:
        raise UsageError(
            f"data set '{table.name}': image (column '{column}'): {chosen[name]}; wanted images [height, width, "
            "channels]; write --data.preprocess FILE.py:FUNCTION with a function that returns an image"
        )
    origin = f"column{'s' if len(columns) > 1 else ''} {', '.join(map(repr, columns))}"
    take = functools.partial(_with_numbers, field, columns, {name: column})
    train, test = (MappedExamples(split, take) for split in table.open(tuple(dict.fromkeys((column, *columns)))))
    if function:
        train, test = (PreprocessedExamples(x, function, str(config.preprocess), chosen) for x in (train, test))
        if name == "image" and (shape := shape_after(train, name)):
            chosen[name] = Image(shape)
        values: Examples = train
    else:
        alone, _ = table.open(columns)
        values = MappedExamples(alone, functools.partial(_with_numbers, field, columns, {}))
    if stored:
        require_settings(stored, task, config)
    else:
        stored = _encoding_of(values, field, columns, task, config)
    settled: Field = Labels(stored.targets, origin=origin)
    if task == "regression":
        target = NumericTarget(stored.targets, stored.mean, stored.std, origin=origin)
        scale = functools.partial(_standardised, target)
        train, test, settled = MappedExamples(train, scale), MappedExamples(test, scale), target
        notes = (*notes, stored.told_targets)
    if name == "text":
        from mpjax.data.text.blocks import tokenized  # local, because images need no tokenizer

        source = tokenized(table.name, train, test, config, predicted=(field, settled), origin=f"column '{column}'")
        return dataclasses.replace(source, notes=(*notes, *source.notes), encoding=stored)
    image: Any = chosen[name]
    fields = {"image": Image(image.shape, depth=image.depth), field: settled}
    return Source(table.name, fields, train, test, notes=notes, encoding=stored)


def _input_of(table: Table, config: Data) -> Literal["image", "text"]:
    if config.text_template or ("text" in config.columns and "image" not in config.columns):
        return "text"
    has_images = "image" in config.columns or could_be("image", table) or not could_be("text", table)
    return "image" if has_images else "text"


def _require_choice(table: Table, columns: Sequence[str], config: Data) -> None:
    """Raises UsageError if a file has other columns than a text and numbers, which rows of a table would have too."""
    others = [name for name in table.columns if name not in columns]
    if others and (rows := as_rows(table)) and not (config.text_template or "text" in config.columns):
        raise UsageError(
            f"data set '{table.name}' has a text, {columns[0]}, and other columns, {', '.join(others)}: to predict "
            f"from the text alone write --data.columns text {columns[0]}; from all columns, --data.name {rows}"
        )


def _columns_for(field: str, table: Table, config: Data) -> tuple[str, ...]:
    names = list(table.columns)
    if config.targets:
        columns = config.targets
    else:
        usual = [name for name in names if name in _USUAL[field] and not isinstance(table.columns[name], Label)]
        if len(usual) != 1:
            raise UsageError(
                f"data set '{table.name}': which columns have the {field} to predict? It has {', '.join(names)}; write "
                "--data.targets COLUMN"
            )
        columns = (usual[0],)
    for name in columns:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"--data.targets {name}: '{table.name}' has {', '.join(names)}{hint}")
        if getattr(table.columns[name], "names", ()):
            raise UsageError(
                f"--data.targets {name}: column '{name}' of '{table.name}' has classes with names, whose numbers mean "
                "nothing else; write --task classification, or name another column"
            )
        if isinstance(table.columns[name], Text) and not config.preprocess:
            raise UsageError(
                f"--data.targets {name}: column '{name}' of '{table.name}' is text; wanted numbers; for classes write "
                "--task classification"
            )
    return tuple(columns)


def _with_numbers(field: str, columns: Sequence[str], inputs: Mapping[str, str], example: Example) -> Example:
    """Builds an example of `field`, the numbers of the columns [K], float64, and of other fields by their columns."""
    values = [example[name] for name in columns]
    if not any(isinstance(value, (str, bytes)) for value in values):
        values = [np.atleast_1d(array(name, value)) for name, value in zip(columns, values, strict=True)]
        if any(value.ndim > 1 for value in values):
            raise UsageError(f"{field}: shape {values[0].shape}; wanted a number, or a list of them, per example")
        if others := [value.dtype for value in values if value.dtype.kind in "cmM"]:  # complex, spans, times
            raise UsageError(
                f"{field}: dtype {others[0]}; wanted numbers; store what is to be predicted as floats, in its unit"
            )
        values = np.concatenate([value.astype(np.float64) for value in values])
    return renamed(inputs, example) | {field: values}


def _standardised(target: NumericTarget, example: Example) -> Example:
    values = array("target", example["target"])
    if values.shape != target.shape:
        raise UsageError(f"target: shape {values.shape}; wanted {target.shape}, that of the first example")
    return {**example, "target": target.standardised(values)}


def _encoding_of(values: Examples, field: str, columns: Sequence[str], task: str, config: Data) -> Encoding:
    first = array(field, values[0][field])
    if first.ndim != 1:
        raise UsageError(f"{field}: shape {first.shape}; wanted one axis, a number for each {field.rstrip('s')}")
    named = len(first) == len(columns)
    names = tuple(columns) if named else tuple(f"{columns[0]}[{at}]" for at in range(len(first)))
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if task == "regression":
        numbers = _all(values, field, len(first))
        if (bad := np.argwhere(~np.isfinite(numbers))).size:
            example, column = map(int, bad[0])
            raise UsageError(
                f"target '{names[column]}' is {numbers[example, column]} in example {example} of split "
                f"'{config.train_split}', and in {len(bad)} in all; wanted a number in every example: drop them"
            )
        mean, std = target_moments(names, numbers.T, "examples")
    return Encoding((), (), task, names, (), mean, std, settings_of(config))


def _all(values: Examples, field: str, width: int) -> np.ndarray:
    """Reads the numbers of all examples, float64 [N, width]."""
    parts = []
    for start in range(0, len(values), _AT_ONCE):
        indices = range(start, min(start + _AT_ONCE, len(values)))
        for index, example in zip(indices, values.__getitems__(indices), strict=True):
            row = array(field, example[field])
            if row.shape != (width,):
                raise UsageError(
                    f"{field}: shape {row.shape} in example {index}; wanted {width}, as many as in the first example"
                )
            parts.append(row.astype(np.float64))
    return np.stack(parts)
