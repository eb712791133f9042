"""Examples of several texts each, whose tokens are in memory, joined, and padded when an example is read."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from mpjax.data.examples import Example, Examples


@dataclasses.dataclass(frozen=True)
class PaddedTexts(Examples):
    """Examples with two fields for each text: tokens, int32 [length], padded at the end, and their number.

    Args:
      texts: for each text of an example, the tokens of all examples: concatenated, unsigned, and int64 [N + 1], the
        index at which each begins, and the total.
      fields: for each text, the fields of its tokens and of their number.
      length: the number of tokens of a text, with padding.
      padding: the padding token.
    """

    texts: Mapping[str, tuple[np.ndarray, np.ndarray]]
    fields: Mapping[str, tuple[str, str]]
    length: int
    padding: int

    def __len__(self) -> int:
        return len(next(iter(self.texts.values()))[1]) - 1

    def __getitem__(self, index: int) -> Example:
        index = range(len(self))[index]
        example: Example = {}
        for side, (values, starts) in self.texts.items():
            text = values[starts[index] : starts[index + 1]]
            example |= padded(text, self.fields[side], self.length, self.padding)
        return example


def padded(text: np.ndarray, fields: tuple[str, str], length: int, padding: int) -> Example:
    """Builds two fields of a text: its tokens, int32 [length], padded at the end, and their number."""
    tokens = np.full(length, padding, np.int32)
    tokens[: len(text)] = text
    name, count = fields
    return {name: tokens, count: len(text)}
