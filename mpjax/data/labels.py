"""Checks the labels of both splits before training: are the splits sorted by class, is the column one of classes?"""

import math
import warnings
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.fields import IGNORED, IGNORED_LABEL, Fields, Label
from mpjax.data.stream import Batches, BatchesInMemory, EvalBatches
from mpjax.errors import DataWarning, UsageError


_CHANCE = 1e-2  # the probability of a warning about splits drawn at random
_ALONE = 0.9  # a column holds no classes if this share of the examples has a unique label
_FEWEST = 10  # the fewest examples that are checked


def check_labels(fields: Fields, batches: Batches, tests: EvalBatches, config: Data) -> None:
    """Checks that some labels of each split count, and that the classes of the splits are plausible.

    Labels of a streamed training split are not read. Test labels are read, also if streamed, until one is found that is
    not ignored; if `config.ignore_index` is empty, nothing is read. The classes are checked only if both splits are in
    memory and the set has a `Label`.

    Warns:
      DataWarning: the classes of the splits are improbable for splits drawn at random, or nearly every training example
        has a class that no other example has.

    Raises:
      UsageError: every label or every pixel of the masks of a split is ignored by `config.ignore_index`.
    """
    train = batches.arrays if isinstance(batches, BatchesInMemory) else None
    if config.ignore_index:
        name, value = ("mask", IGNORED) if "mask" in fields else ("label", IGNORED_LABEL)
        if train is not None:
            _require_counted(config.train_split, name, config, any(np.any(x != value) for x in train[name]))
        counted = any(np.any(batch[name] != value) for batch in tests.parts())
        _require_counted(config.test_split, name, config, counted)
    label: Any = fields.get("label")
    if isinstance(label, Label) and train is not None and tests.arrays is not None:
        numbers = [np.asarray(arrays["label"]) for arrays in (train, tests.arrays)]
        counts = [np.bincount(values[values >= 0], minlength=label.num_classes) for values in numbers]
        if warning := _of_no_class(counts[0], config) or _of_other_classes(counts[0], counts[1], label, config):
            warnings.warn(warning, DataWarning, stacklevel=2)


def _require_counted(split: str, name: str, config: Data, counted: bool) -> None:
    if not counted:
        unit = "pixel of the masks" if name == "mask" else "label"
        raise UsageError(
            f"every {unit} of split '{split}' is ignored by --data.ignore_index "
            f"{' '.join(map(str, config.ignore_index))}; wanted some that count: leave out the values that are classes"
        )


def _of_no_class(train: np.ndarray, config: Data) -> str:
    """Formats the warning that the label column holds no classes, or returns an empty text.

    It warns if there are 10 training examples or more, and at least 90% of them are the only one of their class.
    `train` is the number of training examples of each class, int [num_classes].
    """
    examples, alone = int(train.sum()), int(np.count_nonzero(train == 1))
    if examples < _FEWEST or alone < _ALONE * examples:
        return ""
    header = f"; --data.header is {' '.join(config.header)}: is that the order of the columns?" if config.header else ""
    return (
        f"label: {alone} of the {examples} training examples have a class of their own, so that nothing can be learnt "
        f"for others: is this the column of the classes?{header or ' If not, write --data.columns label COLUMN'}"
    )


def _of_other_classes(train: np.ndarray, test: np.ndarray, label: Label, config: Data) -> str:
    """Formats the warning that the splits were not drawn from the same classes, or returns an empty text.

    It warns of classes that occur only in the test split, and of a test split that lacks at least half of the classes
    that occur in either split. Differences that random splits of these sizes show with a probability of `_CHANCE` or
    more are accepted.

    Args:
      train: the number of training examples of each class, int [num_classes].
      test: the number of test examples of each class, int [num_classes].
      label: the field, for the names of the classes.
      config: the settings of the data, for the names of the splits.
    """
    both, tested = train + test, int(test.sum())
    examples, classes = int(both.sum()), int(np.count_nonzero(both))
    if tested in (0, examples):
        return ""
    problems = []
    unseen = (train == 0) & (classes * (tested / examples) ** test < _CHANCE)
    if unseen.any():
        problems.append(
            f"{int(test[unseen].sum())} of the {tested} examples of the test split '{config.test_split}' have classes "
            f"that no training example has ({_listed(unseen, label)})"
        )
    missing = (test == 0) & (train > 0)
    has = int(np.count_nonzero(test))
    if 2 * has <= classes:
        # An upper bound on the probability that given `has` classes supply all examples of the test split.
        largest = int(np.sort(both)[::-1][:has].sum())
        log = _log_choices(classes, has) + _log_choices(largest, tested) - _log_choices(examples, tested)
        if log < math.log(_CHANCE):
            problems.append(
                f"the test split '{config.test_split}' has no example of {np.count_nonzero(missing)} of the "
                f"{np.count_nonzero(train)} classes of '{config.train_split}' ({_listed(missing, label)})"
            )
    if not problems:
        return ""
    return (
        f"label: {', and '.join(problems)}, as where rows are sorted by class: parts of such a split are no random "
        "parts; shuffle the rows in the data once, or write a --data.test_split that has all classes"
    )


def _log_choices(among: int, chosen: int) -> float:
    """Computes the natural logarithm of the binomial coefficient `among` over `chosen`; -inf if `chosen` > `among`."""
    if chosen > among:
        return -math.inf
    return math.lgamma(among + 1) - math.lgamma(chosen + 1) - math.lgamma(among - chosen + 1)


def _listed(chosen: np.ndarray, label: Label) -> str:
    numbers = np.flatnonzero(chosen)
    names = [label.names[n] if label.names else str(n) for n in numbers[:5]]
    return ", ".join(names) + (", ..." if len(numbers) > len(names) else "")
