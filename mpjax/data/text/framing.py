"""Texts with the special tokens of a single text, cut to a length, and how many of a set are cut."""

from collections.abc import Sequence

import numpy as np

from mpjax.data.examples import Examples
from mpjax.data.text.plain_tokenizers import Ragged, Tokenizer


_SAMPLE = 500


def framed(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> Ragged:
    """Tokenizes texts for a classifier (`Tokenizer.framed`), each with 1 to `length` tokens.

    A text without any token gets one padding token, because attention over no tokens is NaN.
    """
    ragged = tokenizer.framed(texts, length)
    empty = ragged.lengths == 0
    if not empty.any():
        return ragged
    places = (np.cumsum(ragged.lengths) - ragged.lengths)[empty]
    return Ragged(np.insert(ragged.values, places, tokenizer.padding), np.maximum(ragged.lengths, 1))


def told_of_cut_texts(examples: Examples, field: str, tokenizer: Tokenizer, length: int, split: str) -> list[str]:
    """Says, in a list of at most one sentence, how many texts of a sample have more than `length` tokens.

    A value of the field that is no text is passed over: an error tells of it when it is read.
    """
    looked_at = examples.__getitems__(range(0, len(examples), len(examples) // _SAMPLE + 1))
    values = [example.get(field) for example in looked_at]
    texts = [value.decode(errors="replace") if isinstance(value, bytes) else value for value in values]
    texts = [text for text in texts if isinstance(text, str)]
    cut = int((framed(texts, tokenizer, length + 1).lengths > length).sum()) if texts else 0
    told = f"{split}: {cut:,} of {len(texts):,} texts looked at have more than {length} tokens and are cut to them"
    return [f"{told} (--data.length {length})"] if cut else []
