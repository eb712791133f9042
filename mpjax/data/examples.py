"""What a data set is to mpjax: classes, a shape, and two splits of examples that can be read in any order."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol


Example = dict[str, Any]
"""`image`: an array [H, W, C], or the bytes of an encoded image; `label`: an integer."""


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
      num_classes: labels are in [0, num_classes).
      image_shape: (H, W, C) of the stored images; H and W are None where they vary.
      train: the examples to train on.
      test: the examples to evaluate on.
    """

    name: str
    num_classes: int
    image_shape: tuple[int | None, int | None, int]
    train: Examples
    test: Examples

    @property
    def varies(self) -> bool:
        """Whether images differ in size."""
        return None in self.image_shape
