"""Defines `Source`, an opened data set, and checks its examples against its fields."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpjax.data.fields import Field, Fields, Image, Label, called
from mpjax.errors import UsageError


if TYPE_CHECKING:  # only tables, regressions and several labels have one
    from mpjax.data.encoding import Encoding


def conform(example: Mapping[str, Any], fields: Fields) -> dict[str, np.ndarray]:
    """Checks an example, or a batch with any leading axes, and casts it to the batch dtypes.

    Args:
      example: for each of `fields`, a value whose last axes are those of one example; other keys are dropped.
      fields: the expected fields.

    Returns:
      A new dict of the fields in the batch dtypes: images stay uint8 or become float32; class numbers, tokens and
      lengths become int32 with the same values; `Numbers` become int32, float32 or bool.

    Raises:
      UsageError: a field is missing, its values do not match, or fields differ in their leading axes.

    >>> example = conform({"image": np.zeros((2, 2, 1)), "label": 3}, labelled_images(10, (2, 2, 1)))
    >>> example["image"].dtype, example["label"].dtype
    (dtype('float32'), dtype('int32'))
    """
    require_fields(example, fields)
    settled = {name: field.settle(name, array(name, example[name], field)) for name, field in fields.items()}
    leading = {name: value.shape[: value.ndim - fields[name].rank] for name, value in settled.items()}
    (first, batch), *others = leading.items()
    for name, shape in others:
        if shape != batch:
            raise UsageError(
                f"{called(name, fields[name])}: shape {settled[name].shape} does not match "
                f"{first} shape {settled[first].shape}; "
                f"wanted one {name} per {first}: {batch}"
            )
    return settled


def require_fields(example: Mapping[str, Any], fields: Fields) -> None:
    """Raises UsageError if an example lacks one of `fields`; additional entries of the example are accepted."""
    if not fields.keys() <= example.keys():
        first = next(name for name in fields if name not in example)
        raise UsageError(
            f"{first}: missing; the example has {', '.join(example) or 'nothing'}; "
            f"wanted {' and '.join(fields)}; a function for --data.preprocess must return them all"
        )


def array(name: str, value: Any, field: Field | None = None) -> np.ndarray:
    """Converts `value` to a NumPy array of the dtype that NumPy infers, and checks that it holds numbers or bools.

    Args:
      name: the name of the field, for messages.
      value: a number, lists of numbers, or an array.
      field: the field, if known; messages name its origin.

    Raises:
      UsageError: the value holds text, bytes or other objects, has masked elements (`numpy.ma`), or consists of lists
        of unequal lengths.
    """
    name = called(name, field)
    for element in value if isinstance(value, list | tuple) else (value,):
        require_unmasked(name, element)
    try:
        numbers = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"{name}: {error}; wanted lists of one length; pad or cut them") from error
    if numbers.dtype.kind in "OUS":
        raise UsageError(
            f"{name}: got {type(value).__name__} {str(value)[:40]!r}; wanted an array of numbers; "
            "write --data.preprocess FILE.py:FUNCTION with a function that returns one"
        )
    return numbers


def require_unmasked(name: str, value: Any) -> None:
    """Raises UsageError if a `numpy.ma` array has masked elements, whose hidden values NumPy would read anyway."""
    if np.ma.is_masked(value):
        raise UsageError(
            f"{name}: a masked array, of which NumPy would read what is under the mask; return an ordinary one, as "
            "array.filled(0) is"
        )


def require_examples(split: str, count: int) -> None:
    """Raises UsageError if `count`, the number of examples of the split named `split`, is 0."""
    if count == 0:
        raise UsageError(f"split '{split}' is empty: wanted at least one example; write a larger part, as in 'train'")


Example = dict[str, Any]
"""Maps each field to an array, a number, a text, or the bytes of an encoded image."""


class Examples(Protocol):
    """The examples of one split; safe to read from several threads."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: int, /) -> Example:
        """Reads the example at `index`, counted from 0."""
        ...

    def __getitems__(self, indices: Sequence[int], /) -> list[Example]:
        """Reads the examples at `indices`, in their order.

        This default reads one at a time. Many data sets override it, because they read several far faster together.
        """
        return [self[index] for index in indices]


@dataclasses.dataclass(frozen=True, eq=False)
class _OneByOne(Examples):
    """The examples of a list, or of another sequence that reads no several at once."""

    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


class _NoExamples(Examples):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Example:
        raise IndexError(index)


NO_EXAMPLES = _NoExamples()
"""An empty split: of a set whose fields are known without its data."""


@dataclasses.dataclass(frozen=True)
class MappedExamples:
    """Examples to which the function `change` is applied each time one is read; results are not cached."""

    examples: Examples
    change: Callable[[Example], Example]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.change(self.examples[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self.change(example) for example in self.examples.__getitems__(indices)]


def renamed(columns: Mapping[str, str], example: Example) -> Example:
    """Builds an example of fields from an example of columns: `columns` maps each field to the column to take.

    Columns that are not named are dropped. One column may serve several fields. A missing column is a KeyError.
    """
    return {field: example[column] for field, column in columns.items()}


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened data set.

    Args:
      name: the name in error messages.
      fields: the fields of each stored example.
      train: the examples to train on; a list is wrapped.
      test: the examples to evaluate on, also.
      mix: other sets to train on, with the same fields, each with its share of the training examples. This set supplies
        the rest of the training examples, and all test examples.
      notes: messages to the user about how the examples are read.
      encoding: what a run stores to read other examples alike: statistics of the training split. None: nothing.
      places: the file of each test example, or its place in a file, where its number does not tell it; else ().
      trained_dtypes: the dtypes of the images of a set whose examples are not there (`data/example_reader.py`).

    Raises:
      UsageError: `fields` is empty.
    """

    name: str
    fields: Fields
    train: Examples
    test: Examples
    mix: "tuple[Portion, ...]" = ()
    notes: tuple[str, ...] = ()
    encoding: "Encoding | None" = None
    places: Sequence[str] = ()
    trained_dtypes: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not self.fields:
            raise UsageError(
                f"data set '{self.name}' has no fields; wanted at least one; a function for --data.preprocess must "
                "return a dict with an entry for each"
            )
        for split in ("train", "test"):
            if not hasattr(examples := getattr(self, split), "__getitems__"):
                object.__setattr__(self, split, _OneByOne(examples))

    @property
    def trained_on(self) -> "tuple[Source, ...]":
        """This set, followed by the sets of `mix`."""
        return self, *(portion.source for portion in self.mix)

    @property
    def varies(self) -> bool:
        """True if the images of this set differ in height or width: the shape of an `Image` field has None."""
        return any(isinstance(field, Image) and None in field.shape for field in self.fields.values())


class Portion(NamedTuple):
    """A data set of a mixture, and the fraction of all training examples that it supplies, between 0 and 1."""

    source: Source
    fraction: float


def labelled_images(num_classes: int, image_shape: tuple[int | None, int | None, int]) -> Fields:
    """Builds the fields of image classification: `image` [H, W, C] and `label`, an integer in [0, num_classes).

    H and W are None in `image_shape` if they differ among the images.
    """
    return {"image": Image(image_shape), "label": Label(num_classes)}
