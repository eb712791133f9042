"""Reads texts that a user gives to a trained model: lines of files or of stdin, or a column of a table."""

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.data.examples import Source, conform
from mpjax.data.given import Given
from mpjax.data.read import Arrays
from mpjax.data.text.blocks import framed
from mpjax.data.text.plain_tokenizers import Tokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.errors import UsageError


STDIN = "-"
_TABLES = {".csv": ",", ".tsv": "\t"}


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
      config: the tokenizer and the length.
      column: the column of tables.

    Raises:
      UsageError: there is no such file, it holds no lines, or a table has no such column.
    """
    lines = [line for given in inputs for line in _lines_of(given, column)]
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


def _lines_of(given: str, column: str) -> list[Line]:
    name = "stdin" if given == STDIN else given
    if given == STDIN:
        content = sys.stdin.buffer.read()
    else:
        path = expanded(given)
        if not path.is_file():
            raise UsageError(f"{given}: no such file; wanted a file with a text on each line, or - for stdin")
        content = path.read_bytes()
        if delimiter := _TABLES.get(path.suffix.lower()):
            return list(_rows_of_table(given, content, column, delimiter))
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if not lines:
        raise UsageError(f"{name}: empty; wanted a text on each line")
    return [Line(f"{name}:{number}", line.removesuffix(b"\r")) for number, line in enumerate(lines, 1)]


def _rows_of_table(name: str, content: bytes, column: str, delimiter: str) -> Iterator[Line]:
    """Yields the texts of a column.

    Raises:
      UsageError: the table is not UTF-8 or has no such column.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8: {error}; convert the file to UTF-8") from error
    reading = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header = next(reading, [])
    if column not in header:
        raise UsageError(f"{name}: no column '{column}'; it has {', '.join(header) or 'nothing'}; write --column NAME")
    place, begin = header.index(column), reading.line_num + 1
    count = 0
    for row in reading:
        where = f"{name}:{begin}"
        begin = reading.line_num + 1
        count += 1
        if len(row) != len(header):
            yield Line(where, UsageError(f"{where}: {len(row)} values in {len(header)} columns; wanted one for each"))
        else:
            yield Line(where, row[place])
    if not count:
        raise UsageError(f"{name}: no rows below the names of the columns; wanted a text in each")
