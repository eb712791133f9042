"""Turns pairs of texts, such as questions and their answers, into tokens; a third text may be a wrong answer."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Examples, MappedExamples, Source, renamed
from mpjax.data.fields import Field, Length, Tokens
from mpjax.data.table import Table, require_columns
from mpjax.data.text.blocks import chunks
from mpjax.data.text.framing import framed, told_of_cut_texts
from mpjax.data.text.padded_texts import PaddedTexts
from mpjax.data.text.plain_tokenizers import Ragged, Tokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.data.user_function import PreprocessedExamples, load_preprocess
from mpjax.errors import UsageError


QUERY, POSITIVE, NEGATIVE = "query", "positive", "negative"
ANCHOR = "anchor"
"""Another usual name of the column of queries."""

FIELDS = {
    QUERY: ("tokens", "length"),
    POSITIVE: ("positive", "positive_length"),
    NEGATIVE: ("negative", "negative_length"),
}
"""For each text of an example, the fields of its tokens and of their number."""


def text_pairs(table: Table, config: Data) -> Source:
    """Tokenizes the texts of both splits now, and holds the tokens in memory.

    Each text is cut to `config.length` tokens with special tokens. A pair with an empty text is left out, and
    `Source.notes` say how many are.

    Args:
      table: the stored set, with columns `query` (or `anchor`) and `positive`, and perhaps `negative`.
      config: `tokenizer`, `length`, `columns` and `preprocess`.

    Raises:
      UsageError: the set has no such columns, a value is no text, the tokenizer cannot be used, or no pair of a split
        is left.
    """
    columns = _columns(table, config)
    splits: Any = table.open(tuple(dict.fromkeys(columns.values())))
    splits = [MappedExamples(split, functools.partial(renamed, columns)) for split in splits]
    if config.preprocess:
        function = load_preprocess(config.preprocess)
        kinds = {field: table.columns[column] for field, column in columns.items()}
        splits = [PreprocessedExamples(split, function, str(config.preprocess), kinds) for split in splits]
    tokenizer, notes = load_tokenizer(config.tokenizer), _unread(table, columns)
    first = next((split[0] for split in splits if len(split)), {})
    sides = [side for side in FIELDS if side in first]
    if sides[:2] != [QUERY, POSITIVE]:
        raise UsageError(f"data set '{table.name}' has {', '.join(first)}; wanted {QUERY} and {POSITIVE}")
    names = [f"split '{name}' of '{table.name}'" for name in (config.train_split, config.test_split)]
    train, test = (
        _tokenized(split, sides, tokenizer, config.length, name, notes)
        for split, name in zip(splits, names, strict=True)
    )
    fields: dict[str, Field] = {}
    for side in sides:
        name, count = FIELDS[side]
        fields |= {name: Tokens(config.length, tokenizer.vocabulary), count: Length(config.length)}
    return Source(table.name, fields, train, test, notes=tuple(dict.fromkeys(notes)))


def _columns(table: Table, config: Data) -> dict[str, str]:
    """The column of each text of an example; with `config.preprocess`, of what that function gets."""
    known = (*FIELDS, ANCHOR)
    if unknown := sorted(set(config.columns) - set(known)):
        raise UsageError(f"--data.columns {unknown[0]}: pairs of texts have the fields {', '.join(known)}")
    require_columns(table, config.columns)
    if config.preprocess:
        return dict(config.columns) or {name: name for name in table.columns}
    named = {name: name for name in known if name in table.columns} | dict(config.columns)
    queries = [name for name in (QUERY, ANCHOR) if name in (config.columns or named)] or [
        name for name in (QUERY, ANCHOR) if name in named
    ]
    if len(queries) != 1 or POSITIVE not in named:
        has = f"both {QUERY} and {ANCHOR}" if len(queries) > 1 else "no pairs of texts"
        raise UsageError(
            f"data set '{table.name}' has {has}; its columns are {', '.join(table.columns)}; wanted {QUERY} (or "
            f"{ANCHOR}) and {POSITIVE}, and perhaps {NEGATIVE}; write --data.columns {QUERY} COLUMN {POSITIVE} COLUMN"
        )
    chosen = {QUERY: named[queries[0]], POSITIVE: named[POSITIVE]}
    return chosen | ({NEGATIVE: named[NEGATIVE]} if NEGATIVE in named else {})


def _unread(table: Table, columns: Mapping[str, str]) -> list[str]:
    """Says, in a list of at most one note, which columns a run does not read, such as labels and more negatives."""
    others = [name for name in table.columns if name not in columns.values()]
    return [f"'{table.name}': pairs of texts do not read the columns {', '.join(others)}"] if others else []


def _tokenized(
    examples: Examples, sides: Sequence[str], tokenizer: Tokenizer, length: int, split: str, notes: list[str]
) -> PaddedTexts:
    encoded: dict[str, list[Ragged]] = {side: [] for side in sides}
    number = empty = 0
    for chunk in chunks(examples):
        kept = []
        for example in chunk:
            if others := [side for side in FIELDS if side in example and side not in sides]:
                raise UsageError(
                    f"{split}, example {number} has a {others[0]}, and the first example has none: wanted one in all "
                    "examples, or in none"
                )
            texts = [_text(example, side, f"{split}, example {number}") for side in sides]
            number += 1
            if all(text.strip() for text in texts):
                kept.append(texts)
            else:
                empty += 1
        for side, texts in zip(sides, zip(*kept, strict=True), strict=False):
            encoded[side].append(framed(texts, tokenizer, length))
    for side in sides:
        notes += told_of_cut_texts(examples, side, tokenizer, length, f"{side} of {split}")
    if empty:
        notes.append(f"{split}: {empty:,} of {len(examples):,} examples have an empty text and are left out")
    if not encoded[QUERY]:
        raise UsageError(f"{split}: none of {len(examples):,} examples has texts that are not empty")
    texts = {side: _joined(parts, tokenizer) for side, parts in encoded.items()}
    return PaddedTexts(texts, FIELDS, length, tokenizer.padding)


def _joined(parts: Sequence[Ragged], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    small = np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32
    starts = np.concatenate([[0], np.cumsum(np.concatenate([part.lengths for part in parts]))])
    return np.concatenate([part.values.astype(small) for part in parts]), starts


def _text(example: Mapping[str, Any], side: str, where: str) -> str:
    text = example.get(side)
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: {side} is not UTF-8: {error}; convert the data to UTF-8") from error
    if not isinstance(text, str):
        raise UsageError(f"{where}: {side} is {text!r:.60}; wanted a text")
    return text
