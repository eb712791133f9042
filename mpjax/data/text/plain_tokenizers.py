"""The tokenizer protocol, and the tokenizers that need no files: bytes and hashed words."""

import dataclasses
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mpjax.errors import UsageError


class Ragged(NamedTuple):
    """Token sequences of different lengths, concatenated without padding.

    Attributes:
      values: int32 [sum of lengths], the tokens of all sequences, one after the other.
      lengths: int64 [N], the length of each sequence.
    """

    values: np.ndarray
    lengths: np.ndarray


class Tokenizer(Protocol):
    """Converts texts to token ids."""

    @property
    def vocabulary(self) -> int:
        """The vocabulary size. Token ids are in [0, vocabulary), special tokens included."""
        ...

    @property
    def padding(self) -> int:
        """The id of the padding token."""
        ...

    @property
    def end(self) -> int:
        """The id of the end-of-text token."""
        ...

    def whole(self, texts: Sequence[str]) -> Ragged:
        """Tokenizes each text in full, without truncation and without special tokens."""
        ...

    def framed(self, texts: Sequence[str], length: int) -> Ragged:
        """Tokenizes each text with the special tokens that a classifier expects, without padding.

        The text is truncated at its end, so that a sequence has at most `length` tokens with the special ones.

        Raises:
          UsageError: `length` leaves no token for the text besides the special ones.
        """
        ...

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones, and with U+FFFD for bytes that are no character (yet)."""
        ...


PADDING, END, START, SPECIAL = 0, 1, 2, 3  # the special tokens and their number
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class BytesTokenizer:
    """A tokenizer of UTF-8 bytes: byte b is token b + 3, after padding (0), end (1) and start (2).

    It needs no files and encodes every text. Padding, end and bytes have the ids of ByT5 (Xue et al., 2021,
    arXiv:2105.13626). The unknown token of ByT5 is the start token here, because no byte is unknown. A classifier reads
    from the start token.

    >>> BytesTokenizer().whole(["hi"]).values.tolist()
    [107, 108]
    """

    vocabulary: int = 256 + SPECIAL
    padding: int = PADDING
    end: int = END

    def whole(self, texts: Sequence[str]) -> Ragged:
        """Converts each text in full to the tokens of its UTF-8 bytes, without special tokens.

        A character that UTF-8 cannot encode, such as a lone surrogate, becomes `?`.
        """
        encoded = [text.encode(errors="replace") for text in texts]
        values = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int32) + SPECIAL
        return Ragged(values, np.fromiter(map(len, encoded), np.int64, len(encoded)))

    def framed(self, texts: Sequence[str], length: int) -> Ragged:
        """Converts each text to a start token, the tokens of its bytes, and an end token: at most `length` in total.

        The bytes are cut at the end, perhaps within a character.

        Raises:
          UsageError: `length` is below 3.
        """
        if length < 3:
            raise UsageError(f"--data.length {length}: wanted at least 3: the tokenizer adds a start and an end")
        # A character has at least one byte, so characters after `length` need not be encoded.
        encoded = [text[:length].encode(errors="replace")[: length - 2] for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 2
        values = np.frombuffer(b"".join(b"?%b?" % text for text in encoded), np.uint8).astype(np.int32) + SPECIAL
        ends = np.cumsum(lengths)
        values[ends - lengths], values[ends - 1] = START, END
        return Ragged(values, lengths)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones, and with U+FFFD for bytes that are no character (yet).

        >>> BytesTokenizer().text_of([107, 108, 1])
        'hi'
        """
        # No text has the byte 255, which stands for tokens of a model with more of them.
        values = (min(token - SPECIAL, 255) for token in tokens if token >= SPECIAL)
        return bytes(values).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class WordsTokenizer:
    """A tokenizer that maps each lower-case word or punctuation mark to a token by its CRC-32 checksum.

    Different words may share a token (the hashing trick: Weinberger et al., 2009, arXiv:0902.2206). Tokens cannot be
    decoded, so it is meant for classification. Padding is 0, end 1 and start 2; words are 3 to `vocabulary` - 1.
    """

    vocabulary: int = 8192
    padding: int = PADDING
    end: int = END

    def whole(self, texts: Sequence[str]) -> Ragged:
        """Converts each text in full to the tokens of its words and punctuation marks, without special tokens."""
        return _ragged([self._numbers(text) for text in texts])

    def framed(self, texts: Sequence[str], length: int) -> Ragged:
        """Converts each text to a start token, the tokens of its words and punctuation marks, and an end token.

        The last words are cut, so that there are at most `length` tokens in total.

        Raises:
          UsageError: `length` is below 3.
        """
        if length < 3:
            raise UsageError(f"--data.length {length}: wanted at least 3: the tokenizer adds a start and an end")
        return _ragged([[START, *self._numbers(text)[: length - 2], END] for text in texts])

    def text_of(self, tokens: Sequence[int]) -> str:
        """Raises UsageError: several words share a token."""
        raise UsageError(
            "the tokenizer `words` has no text for a token: train with --data.tokenizer bytes to get texts"
        )

    def _numbers(self, text: str) -> list[int]:
        buckets = self.vocabulary - SPECIAL
        return [SPECIAL + zlib.crc32(word.encode(errors="replace")) % buckets for word in _WORD.findall(text.lower())]


def _ragged(numbers: list[list[int]]) -> Ragged:
    lengths = np.fromiter(map(len, numbers), np.int64, len(numbers))
    values = np.fromiter((number for text in numbers for number in text), np.int32, int(lengths.sum()))
    return Ragged(values, lengths)
