"""What a tokenizer is, and those that need no files: a token for each byte, or for each word by its checksum."""

import dataclasses
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mpjax.errors import UsageError


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


PADDING, END, START, SPECIAL = 0, 1, 2, 3  # special tokens, and how many there are
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class BytesTokenizer:
    """UTF-8: byte b is token b + 3, after padding (0), end (1) and start (2); needs no files and knows every text.

    The numbers of padding, end and bytes are those of ByT5 (Xue et al., 2021, arXiv:2105.13626), whose unknown token is
    the start here, from which a classifier reads: no byte is unknown.
    """

    vocabulary: int = 256 + SPECIAL
    padding: int = PADDING
    end: int = END

    def whole(self, texts: Sequence[str]) -> Ragged:
        """The bytes of each text."""
        encoded = [text.encode(errors="replace") for text in texts]
        values = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int32) + SPECIAL
        return Ragged(values, np.fromiter(map(len, encoded), np.int64, len(encoded)))

    def framed(self, texts: Sequence[str], length: int) -> Ragged:
        """Start, bytes, end."""
        if length < 3:
            raise UsageError(f"--data.length {length}: wanted at least 3: the tokenizer adds a start and an end")
        # A character is at least a byte: what is cut off here need not be encoded.
        encoded = [text[:length].encode(errors="replace")[: length - 2] for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 2
        values = np.frombuffer(b"".join(b"?%b?" % text for text in encoded), np.uint8).astype(np.int32) + SPECIAL
        ends = np.cumsum(lengths)
        values[ends - lengths], values[ends - 1] = START, END
        return Ragged(values, lengths)


@dataclasses.dataclass(frozen=True)
class WordsTokenizer:
    """Words and punctuation marks in lower case, each the token of its checksum; a few words share a token.

    The hashing trick (Weinberger et al., 2009, arXiv:0902.2206). It cannot be undone, so it is for classification.
    """

    vocabulary: int = 8192
    padding: int = PADDING
    end: int = END

    def whole(self, texts: Sequence[str]) -> Ragged:
        """The words of each text."""
        return _ragged([self._numbers(text) for text in texts])

    def framed(self, texts: Sequence[str], length: int) -> Ragged:
        """Start, words, end."""
        if length < 3:
            raise UsageError(f"--data.length {length}: wanted at least 3: the tokenizer adds a start and an end")
        return _ragged([[START, *self._numbers(text)[: length - 2], END] for text in texts])

    def _numbers(self, text: str) -> list[int]:
        buckets = self.vocabulary - SPECIAL
        return [SPECIAL + zlib.crc32(word.encode()) % buckets for word in _WORD.findall(text.lower())]


def _ragged(numbers: list[list[int]]) -> Ragged:
    lengths = np.fromiter(map(len, numbers), np.int64, len(numbers))
    values = np.fromiter((number for text in numbers for number in text), np.int32, int(lengths.sum()))
    return Ragged(values, lengths)
