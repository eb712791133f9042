"""Turns pairs of a source and a target, such as a text and its translation, into tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Examples, Source
from mpjax.data.fields import Field, Length, Tokens
from mpjax.data.table import Table
from mpjax.data.text.instructions import read_in_chunks, stored_rows
from mpjax.data.text.padded_texts import PaddedTexts
from mpjax.data.text.plain_tokenizers import Tokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.errors import UsageError


FIELDS = {"source": ("tokens", "length"), "target": ("target_tokens", "target_length")}
"""For each text of an example, the fields of its tokens and of their number."""

Joined = tuple[np.ndarray, np.ndarray]
"""The tokens of all texts, one after the other, unsigned, and int64 [N + 1], where each begins, and the total."""


def sources_and_targets(table: Table, config: Data) -> Source:
    """Tokenizes the texts of both splits now, and holds the tokens in memory.

    Each text is cut to `config.length` tokens, the last of which is the end-of-text token, as T5 is trained. A pair
    with an empty text is left out. `Source.notes` say how many are cut and left out.

    Args:
      table: the stored set, with columns `source` and `target`.
      config: `tokenizer`, `length`, `columns` and `preprocess`.

    Raises:
      UsageError: the set has no such columns, a value is no text, the tokenizer cannot be used, or no pair of a split
        is left.
    """
    if config.length < 2:
        raise UsageError(f"--data.length {config.length}: wanted at least 2, a token and the end-of-text token")
    rows = stored_rows(table, config, [tuple(FIELDS)], kind="pairs of source and target")
    tokenizer = load_tokenizer(config.tokenizer)
    notes: list[str] = []
    train, test = (_tokenized(examples, tokenizer, config.length, split, notes) for examples, split in rows)
    fields: dict[str, Field] = {}
    for name, count in FIELDS.values():
        fields |= {name: Tokens(config.length, tokenizer.vocabulary), count: Length(config.length)}
    return Source(table.name, fields, train, test, notes=tuple(dict.fromkeys(notes)))


def with_end(texts: list[str], tokenizer: Tokenizer, length: int) -> tuple[list[np.ndarray], int]:
    """Tokenizes texts to at most `length` tokens, with the end-of-text token last; also counts those that are cut."""
    values, lengths = tokenizer.whole(texts)
    ends = np.cumsum(lengths)
    kept = [values[end - size : end][: length - 1] for end, size in zip(ends, lengths, strict=True)]
    return [np.append(text, tokenizer.end) for text in kept], int(np.sum(lengths > length - 1))


def _tokenized(examples: Examples, tokenizer: Tokenizer, length: int, split: str, notes: list[str]) -> PaddedTexts:
    encoded: dict[str, list[np.ndarray]] = {side: [] for side in FIELDS}
    empty, cut = 0, dict.fromkeys(FIELDS, 0)
    for read in read_in_chunks(examples, split, _texts):
        kept = [texts for texts in read if all(text.strip() for text in texts)]
        empty += len(read) - len(kept)
        for side, texts in zip(FIELDS, zip(*kept, strict=True), strict=False):
            tokens, count = with_end(list(texts), tokenizer, length)
            encoded[side] += tokens
            cut[side] += count
    if any(cut.values()):
        counts = " and ".join(f"{count:,} {side}s" for side, count in cut.items())
        notes.append(
            f"{split}: {counts} of {len(examples):,} have more than {length} tokens with the end-of-text token and are "
            f"cut to them (--data.length {length})"
        )
    if empty:
        notes.append(f"{split}: {empty:,} of {len(examples):,} examples have an empty text and are left out")
    if not encoded["source"]:
        raise UsageError(f"{split}: none of {len(examples):,} examples has texts that are not empty")
    texts = {side: _joined(tokens, tokenizer) for side, tokens in encoded.items()}
    return PaddedTexts(texts, FIELDS, length, tokenizer.padding)


def _joined(texts: list[np.ndarray], tokenizer: Tokenizer) -> Joined:
    small = np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32
    return np.concatenate(texts).astype(small), np.cumsum([0, *map(len, texts)])


def _texts(example: Mapping[str, Any], where: str) -> tuple[str, ...]:
    for side in FIELDS:
        if not isinstance(example.get(side), str):
            value = example.get(side)
            shown = value.item() if isinstance(value, np.generic) else value
            raise UsageError(f"{where}: {side} is {shown!r:.60}; wanted a text, such as --data.preprocess can make")
    return tuple(example[side] for side in FIELDS)
