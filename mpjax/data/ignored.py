"""Marks examples whose stored label is one to ignore."""

from collections.abc import Callable, Sequence

import numpy as np

from mpjax.data.examples import Example
from mpjax.data.fields import IGNORED_LABEL
from mpjax.errors import UsageError


def with_ignored(values: Sequence[int]) -> Callable[[Example], Example]:
    """Returns a function that replaces a `label` among these stored values by `IGNORED_LABEL`.

    Any other label stays as it is, so that one outside of the classes is an error, -1 included.
    """

    def marked(example: Example) -> Example:
        label = example.get("label")
        if label is None or np.ndim(label) or np.asarray(label).dtype.kind not in "iu":
            return example  # the check of fields reports it
        if int(label) in values:
            return {**example, "label": IGNORED_LABEL}
        if int(label) == IGNORED_LABEL:
            raise UsageError(
                f"label: {IGNORED_LABEL} is outside the classes, and not among --data.ignore_index "
                f"{' '.join(map(str, values))}; add it there, or drop the example"
            )
        return {**example, "label": int(label)}  # of one dtype with -1, also where unsigned ones are stored

    return marked
