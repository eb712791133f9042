"""Opens a stored data set of images with the numbers or the several labels to predict from each."""

import difflib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.column_statistics import target_moments
from mpjax.data.encoding import Encoding, require_settings, settings_of
from mpjax.data.examples import Example, Examples, MappedExamples, Source, array
from mpjax.data.fields import Field, Image, Label
from mpjax.data.image_range import in_range
from mpjax.data.table import Table, Text, choose_columns
from mpjax.data.targets import Labels, NumericTarget
from mpjax.data.user_function import PreprocessedExamples, load_preprocess, shape_after
from mpjax.errors import UsageError


_USUAL = {"target": ("target", "targets", "label", "y"), "labels": ("labels", "label", "targets")}
_AT_ONCE = 512  # examples whose targets are read together


def with_targets(table: Table, task: str, config: Data, stored: Encoding | None) -> Source:
    """Opens images with the field `target` (regression) or `labels` (multilabel) of the columns `config.targets`.

    The columns hold a number each, or one of them all numbers of an example, [K]. A preprocess function gets an example
    with the image and the numbers [K] in the units of the data, and returns both. The numbers of a regression are
    standardised, in float64, by the statistics of `stored`, or else of the training split, which is then read whole:
    only the columns of the numbers, but with a preprocess function the images too.

    Raises:
      UsageError: a column does not exist or holds text, a number of the training split is missing, all numbers of a
        target are alike, or `stored` is of other settings.
    """
    field = "target" if task == "regression" else "labels"
    (image,) = choose_columns(table, ("image",), config).values()
    columns = _columns_for(field, table, config)
    chosen, notes = in_range({"image": table.columns[image]}, config, table.name)
    function = load_preprocess(config.preprocess) if config.preprocess else None
    if not isinstance(chosen["image"], Image) and not function:
        raise UsageError(
            f"data set '{table.name}': image (column '{image}'): {chosen['image']}; wanted images [height, width, "
            "channels]; write --data.preprocess FILE.py:FUNCTION with a function that returns an image"
        )
    origin = f"column{'s' if len(columns) > 1 else ''} {', '.join(map(repr, columns))}"
    take = functools.partial(_with_numbers, field, columns, image)
    train, test = (MappedExamples(split, take) for split in table.open(tuple(dict.fromkeys((image, *columns)))))
    if function:
        train, test = (PreprocessedExamples(x, function, str(config.preprocess), chosen) for x in (train, test))
        if shape := shape_after(train, "image"):
            chosen["image"] = Image(shape)
        values: Examples = train
    else:
        alone, _ = table.open(columns)
        values = MappedExamples(alone, functools.partial(_with_numbers, field, columns, None))
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
    stored_image: Any = chosen["image"]
    fields = {"image": Image(stored_image.shape, depth=stored_image.depth), field: settled}
    return Source(table.name, fields, train, test, notes=notes, encoding=stored)


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


def _with_numbers(field: str, columns: Sequence[str], image: str | None, example: Example) -> Example:
    """Builds an example of the image, if any, and of `field`, the numbers of the columns [K] in their stored dtype."""
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
    return ({} if image is None else {"image": example[image]}) | {field: values}


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
