"""Reads texts that a user gives to a trained model: lines of files or of stdin, or a column of a table."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.data.examples import Source, conform
from mpjax.data.given import Given
from mpjax.data.stacking import Arrays
from mpjax.data.text.blocks import framed
from mpjax.data.text.given_table import DELIMITERS, column_of_table
from mpjax.data.text.plain_tokenizers import Tokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.errors import UsageError


STDIN = "-"


class Line(NamedTuple):
    """A text as stored.

    Attributes:
      name: file and line.
      text: the text, its bytes, or the error that names what is wrong with it.
    """

    name: str
    text: str | bytes | UsageError


def given_texts(inputs: Sequence[str], source: Source, config: Data, *, column: str) -> Given:
    """Returns texts, tokenized as those of the set.

    Args:
      inputs: files of lines, tables (.csv, .tsv), or `-` for lines of stdin.
      source: the set that the model was trained on, for a classifier with the field `length`.
      config: the tokenizer, the length, and the names of the columns of tables without a line of names.
      column: the column of tables.

    Raises:
      UsageError: there is no such file, it holds no lines, or as `column_of_table`.
    """
    lines = [line for given in inputs for line in _lines_of(given, column, config.header)]
    tokenizer = load_tokenizer(config.tokenizer)
    rows_of = _classified if "length" in source.fields else _modelled
    fields = {name: field for name, field in source.fields.items() if name != "label"}

    def rows(line: Line) -> Arrays:
        found = rows_of(_decoded(line), tokenizer, config.length)
        counted = {"count": found.pop("count")} if "count" in found else {}
        return conform(found, fields) | counted

    return Given([line.name for line in lines], lambda positions: [lines[position] for position in positions], rows)


def _classified(text: str, tokenizer: Tokenizer, length: int) -> Arrays:
    values = framed([text], tokenizer, length).values
    tokens = np.full((1, length), tokenizer.padding, np.int32)
    tokens[0, : len(values)] = values
    return {"tokens": tokens, "length": np.asarray([len(values)])}


def _modelled(text: str, tokenizer: Tokenizer, length: int) -> Arrays:
    """Returns the text between end-of-text tokens in blocks: `tokens` [n, length + 1], of which the model predicts the
    first `count` [n]."""
    values = np.asarray([tokenizer.end, *tokenizer.whole([text]).values, tokenizer.end], np.int32)
    starts = range(0, len(values) - 1, length)
    tokens = np.full((len(starts), length + 1), tokenizer.end, np.int32)
    count = np.zeros(len(starts), np.int32)
    for row, start in enumerate(starts):
        block = values[start : start + length + 1]
        tokens[row, : len(block)] = block
        count[row] = len(block) - 1
    return {"tokens": tokens, "count": count}


def _decoded(line: Line) -> str:
    if isinstance(line.text, UsageError):
        raise line.text
    if isinstance(line.text, str):
        return line.text
    try:
        return line.text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{line.name}: not UTF-8: {error}; convert the file to UTF-8") from error


def _lines_of(given: str, column: str, header: Sequence[str]) -> list[Line]:
    name = "stdin" if given == STDIN else given
    if given == STDIN:
        content = sys.stdin.buffer.read()
    else:
        path = expanded(given)
        if not path.is_file():
            raise UsageError(f"{given}: no such file; wanted a file with a text on each line, or - for stdin")
        content = path.read_bytes()
        if delimiter := DELIMITERS.get(path.suffix.lower()):
            return [Line(*row) for row in column_of_table(given, content, column, delimiter=delimiter, header=header)]
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if not lines:
        raise UsageError(f"{name}: empty; wanted a text on each line")
    return [Line(f"{name}:{number}", line.removesuffix(b"\r")) for number, line in enumerate(lines, 1)]
