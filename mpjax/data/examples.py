"""What a data set is to mpjax, and what its examples must be before a step sees them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpjax.data.fields import Field, Fields, Image, Label, called
from mpjax.errors import UsageError


def conform(example: Mapping[str, Any], fields: Fields) -> dict[str, np.ndarray]:
    """Checks one example, or a batch of any nesting, and settles its dtypes.

    Args:
      example: a value for each of `fields`, [..., shape of the field]; others are left out.
      fields: what each must be.

    Returns:
      The fields in the dtypes of the contract: images uint8 as they were or float32, everything else int32 of the same
      value.

    Raises:
      UsageError: a field is missing or is not what it must be; the message names it, says what it is and what is
        wanted.
    """
    if missing := [name for name in fields if name not in example]:
        raise UsageError(
            f"{missing[0]}: missing; the example has {', '.join(example) or 'nothing'}; "
            f"wanted {' and '.join(fields)}; a function for --data.preprocess must return them all"
        )
    settled = {name: field.settle(name, array(name, example[name], field)) for name, field in fields.items()}
    leading = {name: value.shape[: value.ndim - fields[name].rank] for name, value in settled.items()}
    (first, batch), *others = leading.items()
    for name, shape in others:
        if shape != batch:
            raise UsageError(
                f"{called(name, fields[name])}: shape {settled[name].shape} does not go with "
                f"{first} shape {settled[first].shape}; "
                f"wanted one {name} per {first}: {batch}"
            )
    return settled


def array(name: str, value: Any, field: Field | None = None) -> np.ndarray:
    """`value` as an array; lists of unequal length are refused.

    Args:
      name: of the field, for messages.
      value: numbers, in lists or an array.
      field: which it is, where that is known: says where the value comes from.

    Raises:
      UsageError: it is not an array of numbers.
    """
    name = called(name, field)
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"{name}: {error}; wanted lists of one length; pad or cut them to one") from error
    if found.dtype.kind in "OUS":
        raise UsageError(
            f"{name}: got {type(value).__name__} {str(value)[:40]!r}; wanted an array of numbers; "
            "write --data.preprocess FILE.py:FUNCTION with a function that returns one"
        )
    return found


def require_examples(split: str, count: int) -> None:
    """Raises UsageError when a split is empty."""
    if count == 0:
        raise UsageError(f"split '{split}' is empty: wanted at least one example; write a larger part, as in 'train'")


Example = dict[str, Any]
"""By field: an array, or the bytes of an encoded image."""


class Examples(Protocol):
    """One split; safe to read from several threads."""

    def __len__(self) -> int:
        """How many examples there are."""
        ...

    def __getitem__(self, index: int, /) -> Example:
        """One example."""
        ...

    def __getitems__(self, indices: Sequence[int], /) -> list[Example]:
        """Several at once, which is far cheaper than one by one."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set, opened.

    Args:
      name: what error messages call it.
      fields: what each stored example holds.
      train: the examples to train on.
      test: the examples to evaluate on.
    """

    name: str
    fields: Fields
    train: Examples
    test: Examples

    @property
    def varies(self) -> bool:
        """Whether images differ in size."""
        return any(isinstance(field, Image) and None in field.shape for field in self.fields.values())


def labelled_images(num_classes: int, image_shape: tuple[int | None, int | None, int]) -> Fields:
    """The fields of image classification: `image` [H, W, C] and `label` in [0, num_classes)."""
    return {"image": Image(image_shape), "label": Label(num_classes)}
