"""What a tokenizer is to mpjax: texts in, token numbers out."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Ragged(NamedTuple):
    """Sequences of several lengths.

    Attributes:
      values: int32 [sum of lengths], one sequence after the other.
      lengths: int64 [N].
    """

    values: np.ndarray
    lengths: np.ndarray


class Tokenizer(Protocol):
    """Text to token numbers."""

    @property
    def vocabulary(self) -> int:
        """Token numbers are below this."""
        ...

    @property
    def padding(self) -> int:
        """What fills short texts up."""
        ...

    @property
    def end(self) -> int:
        """What stands between texts."""
        ...

    def whole(self, texts: Sequence[str]) -> Ragged:
        """Each text as it is, without special tokens."""
        ...

    def framed(self, texts: Sequence[str], length: int) -> Ragged:
        """Each text between the special tokens that a classifier expects, cut to `length` with these."""
        ...
