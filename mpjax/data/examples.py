"""What a data set is to mpjax: fields, and two splits of examples that can be read in any order."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from mpjax.data.fields import Fields, Image, Label


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
