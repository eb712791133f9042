"""A stored data set before it serves a task: named columns, some of which say what they hold."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from mpjax.data.examples import Examples
from mpjax.data.fields import Image, Label, Mask


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
