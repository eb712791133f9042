"""Turns texts into tokens of one length: padded texts for classifiers, blocks for language models."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Example, Examples, Source, array
from mpjax.data.fields import Field, Length, Tokens
from mpjax.data.text.framing import framed, told_of_cut_texts
from mpjax.data.text.plain_tokenizers import Ragged, Tokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.errors import UsageError


_AT_ONCE = 10_000  # texts: enough to occupy the tokenizer's threads, few enough to hold as Python objects


@dataclasses.dataclass(frozen=True)
class TokenizedExamples(Examples):
    """Texts as `tokens`, int32 [length], padded at the end, with their `length` before padding and what is predicted.

    Args:
      values: unsigned [total], the tokens of all texts, concatenated; no text has more than `length`.
      starts: int64 [N + 1], the index in `values` at which each text starts, and the total.
      predicted: the name and the values [N, ...] of the field that is predicted, such as `label`.
      length: the number of tokens of an example, with padding.
      padding: the padding token.
    """

    values: np.ndarray
    starts: np.ndarray
    predicted: tuple[str, np.ndarray]
    length: int
    padding: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Example:
        index = range(len(self))[index]
        text = self.values[self.starts[index] : self.starts[index + 1]]
        tokens = np.full(self.length, self.padding, np.int32)
        tokens[: len(text)] = text
        name, values = self.predicted
        return {"tokens": tokens, "length": len(text), name: values[index]}


@dataclasses.dataclass(frozen=True)
class Blocks(Examples):
    """One long text cut into blocks, each an example with `tokens`, int32 [length + 1].

    The last token of a block is the first of the next block, so that each token but the first is predicted once. Tokens
    at the end that fill no block are left out.

    Args:
      values: unsigned [total], the tokens of the text.
      length: the number of predicted tokens of a block.
    """

    values: np.ndarray
    length: int

    def __len__(self) -> int:
        return max(len(self.values) - 1, 0) // self.length

    def __getitem__(self, index: int) -> Example:
        start = range(len(self))[index] * self.length
        return {"tokens": self.values[start : start + self.length + 1].astype(np.int32)}


def tokenized(
    name: str,
    train: Examples,
    test: Examples,
    config: Data,
    *,
    predicted: tuple[str, Field] | None,
    origin: str = "",
) -> Source:
    """Tokenizes all texts of both splits now, and holds the tokens in memory.

    A token takes two bytes, or four if the vocabulary exceeds 2**16. If a field is predicted from a text, each text is
    cut to `config.length` tokens with special tokens, and padded to that length: the fields are `tokens`, `length` and
    the predicted one. Otherwise, the texts of a split are concatenated in order, with an end-of-text token before the
    first text and after each text, and cut into blocks: the only field is `tokens`, [config.length + 1]. Tokens after
    the last whole block are dropped.

    Args:
      name: the name of the set, for messages.
      train: examples with `text`, str or UTF-8 bytes, and the predicted field, if there is one.
      test: examples with the same fields.
      config: `tokenizer`, `length` and `documents`.
      predicted: the name of the field that is predicted from a text, such as `label`, and the field; None: each next
        token is predicted.
      origin: the origin of the texts, for messages.

    Raises:
      UsageError: `config.length` is below 1, the tokenizer does not exist, a value is not a text, or a split is too
        short for one block.
    """
    if config.length < 1:
        raise UsageError(f"--data.length {config.length}: wanted at least 1 token, as in --data.length 128")
    tokenizer = load_tokenizer(config.tokenizer)
    where = f"text{f' ({origin})' if origin else ''} of '{name}'"
    splits = {
        config.train_split: train,
        config.test_split: test,
    }  # equal splits are tokenized once
    if predicted is None:
        blocks = {
            split_name: _blocks(split, tokenizer, config.length, f"split '{split_name}' of '{name}'", where)
            for split_name, split in splits.items()
        }
        apart = tokenizer.end if config.documents == "apart" else None
        tokens = Tokens(config.length + 1, tokenizer.vocabulary, document_end=apart, origin=origin)
        return Source(name, {"tokens": tokens}, blocks[config.train_split], blocks[config.test_split])
    fields: dict[str, Field] = {
        "tokens": Tokens(config.length, tokenizer.vocabulary, origin=origin),
        "length": Length(config.length),
        predicted[0]: predicted[1],
    }
    padded = {
        split_name: _padded(split, predicted[0], tokenizer, config.length, where)
        for split_name, split in splits.items()
    }
    notes = [
        note
        for split_name, split in splits.items()
        for note in told_of_cut_texts(split, "text", tokenizer, config.length, f"split '{split_name}' of '{name}'")
    ]
    return Source(name, fields, padded[config.train_split], padded[config.test_split], notes=tuple(notes))


def _padded(examples: Examples, predicted: str, tokenizer: Tokenizer, length: int, where: str) -> TokenizedExamples:
    encoded: list[Ragged] = []
    values_of_field: list[Any] = []
    for chunk in chunks(examples):
        encoded.append(framed([_text(example, where) for example in chunk], tokenizer, length))
        values_of_field += [example[predicted] for example in chunk]
    starts = np.concatenate([[0], np.cumsum(np.concatenate([ragged.lengths for ragged in encoded]))])
    values = np.concatenate([_small(ragged.values, tokenizer) for ragged in encoded])
    field = predicted, array(predicted, values_of_field)
    return TokenizedExamples(values, starts, field, length, tokenizer.padding)


def _blocks(examples: Examples, tokenizer: Tokenizer, length: int, split: str, where: str) -> Blocks:
    tokens = [_small(np.asarray([tokenizer.end]), tokenizer)]
    for chunk in chunks(examples):
        values, lengths = tokenizer.whole([_text(example, where) for example in chunk])
        tokens.append(_small(np.insert(values, np.cumsum(lengths), tokenizer.end), tokenizer))
    blocks = Blocks(np.concatenate(tokens), length)
    if not len(blocks):
        shorter = max((len(blocks.values) - 1) // 2, 1)
        raise UsageError(
            f"{split} has {len(blocks.values)} tokens; wanted at least {length + 1} for one block; "
            f"write --data.length {shorter}",
            repair={"data.length": shorter},
        )
    return blocks


def chunks(examples: Examples, size: int = _AT_ONCE) -> Iterator[list[Example]]:
    """Yields examples in lists of `size`, the last of which may be shorter."""
    for start in range(0, len(examples), size):
        yield examples.__getitems__(range(start, min(start + size, len(examples))))


def _text(example: Mapping[str, Any], where: str) -> str:
    text = example.get("text")
    if isinstance(text, str):
        return text
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: not UTF-8: {error}; convert the data to UTF-8") from error
    raise UsageError(f"{where}: got {type(text).__name__}; wanted str or UTF-8 bytes")


def _small(values: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    return values.astype(np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32)
