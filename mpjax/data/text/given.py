"""Reads a user's texts as inputs to a trained model: lines of files or stdin, or a column of a table."""

import csv
import io
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.data.examples import Source, conform
from mpjax.data.given import Inputs
from mpjax.data.sources.column_names import as_compared, number_among
from mpjax.data.stacking import Arrays
from mpjax.data.text.framing import framed
from mpjax.data.text.plain_tokenizers import Tokenizer
from mpjax.data.text.template import FLAG, Template
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.errors import DataWarning, UsageError


STDIN = "-"


class StoredText(NamedTuple):
    """A text as stored, not yet decoded or tokenized.

    Attributes:
      name: the file and line of the text, as `FILE:LINE`, counted from 1.
      text: the text, its UTF-8 bytes, or the error to raise when the text is read.
    """

    name: str
    text: str | bytes | UsageError


def given_texts(inputs: Sequence[str], source: Source, config: Data, *, columns: Template) -> Inputs:
    """Reads all texts into memory now; each is tokenized, as the texts of the set are, only when a batch needs it.

    Args:
      inputs: paths of tables (.csv, .tsv, or .jsonl with an object on each line), of other files, in which each line is
        a text, also an empty one, or `-` for the lines of stdin.
      source: the set that the model was trained on. If it has a field `length`, the model is a classifier or an
        encoder: a text is one row of a batch, cut to the length of `tokens`. Otherwise it is a language model: a text
        is cut into as many rows of that length as it needs, and `count` says how many tokens of a row are predicted.
      config: the tokenizer, and the column names of tables without a line of names.
      columns: the columns of tables that make a text. Of several, or with text between them, the inputs have to be
        tables.

    Raises:
      UsageError: a file does not exist or holds no lines, or `texts_of_table` or `load_tokenizer` raises. When a text
        is tokenized: it is not UTF-8, or its row has another length.
    """
    lines = stored_texts(inputs, columns, header=config.header)
    tokenizer = load_tokenizer(config.tokenizer)
    rows_of = _classified if "length" in source.fields else _modelled
    fields: dict[str, Any] = {name: field for name, field in source.fields.items() if name in ("tokens", "length")}
    length = fields["tokens"].length - ("length" not in fields)  # a user's own source has its own

    def to_arrays(line: StoredText) -> Arrays:
        arrays = rows_of(decoded(line), tokenizer, length)
        counted = {"count": arrays.pop("count")} if "count" in arrays else {}
        return conform(arrays, fields) | counted

    return Inputs(
        [line.name for line in lines], lambda positions: [lines[position] for position in positions], to_arrays
    )


def stored_texts(inputs: Sequence[str], columns: Template, *, header: Sequence[str] = ()) -> list[StoredText]:
    """Reads the texts of files or stdin, with the arguments and errors of `given_texts`."""
    return [line for path in inputs for line in _lines_of(path, columns, header)]


def _classified(text: str, tokenizer: Tokenizer, length: int) -> Arrays:
    values = framed([text], tokenizer, length).values
    if len(values) == length and len(framed([text], tokenizer, length + 1).values) > length:
        warnings.warn(f"texts of more than {length} tokens are cut to them, as in training", DataWarning, stacklevel=2)
    tokens = np.full((1, length), tokenizer.padding, np.int32)
    tokens[0, : len(values)] = values
    return {"tokens": tokens, "length": np.asarray([len(values)])}


def _modelled(text: str, tokenizer: Tokenizer, length: int) -> Arrays:
    """Puts an end-of-text token on each side of a text, and cuts it into blocks: `tokens` [n, length + 1], `count` [n].

    The last token of a block is the first of the next. The model predicts tokens 1 to `count` of a block, counted from
    0; the rest of the last block is padded with end-of-text tokens.
    """
    values = np.asarray([tokenizer.end, *tokenizer.whole([text]).values, tokenizer.end], np.int32)
    starts = range(0, len(values) - 1, length)
    tokens = np.full((len(starts), length + 1), tokenizer.end, np.int32)
    count = np.zeros(len(starts), np.int32)
    for row, start in enumerate(starts):
        block = values[start : start + length + 1]
        tokens[row, : len(block)] = block
        count[row] = len(block) - 1
    return {"tokens": tokens, "count": count}


def decoded(line: StoredText) -> str:
    """The text of a line. Raises UsageError if it is not UTF-8 or its row has another length."""
    if isinstance(line.text, UsageError):
        raise line.text
    if isinstance(line.text, str):
        return line.text
    try:
        return line.text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{line.name}: not UTF-8: {error}; convert the file to UTF-8") from error


def require_tables(inputs: Sequence[str], column: str) -> None:
    """Raises UsageError if none of the inputs is a table, of which `--column` names a column."""
    endings = [expanded(location).suffix.lower() for location in inputs if location != STDIN]
    if {*endings}.isdisjoint((*DELIMITERS, *OBJECTS)):
        raise UsageError(
            f"--column {column}: {' '.join(inputs)} has lines of text and no columns; leave it out, or name a .csv, "
            ".tsv or .jsonl file"
        )


def _lines_of(location: str, columns: Template, header: Sequence[str]) -> list[StoredText]:
    name = "stdin" if location == STDIN else location
    ending = "" if location == STDIN else expanded(location).suffix.lower()
    delimiter = DELIMITERS.get(ending, "")
    if ending in _BINARY:
        raise UsageError(
            f"{name}: wanted a text on each line, or a table, FILE.csv, FILE.tsv or FILE.jsonl; convert it"
        )
    if not delimiter and ending not in OBJECTS and columns != Template.alone(columns.columns[0]):
        raise UsageError(
            f"{name}: the run makes a text of the columns {', '.join(dict.fromkeys(columns.columns))}, by {FLAG}; "
            "wanted a table with these columns, FILE.csv, FILE.tsv or FILE.jsonl"
        )
    if location == STDIN:
        content = sys.stdin.buffer.read()
    else:
        path = expanded(location)
        if not path.is_file():
            raise UsageError(f"{location}: no such file; wanted a file with a text on each line, or - for stdin")
        content = path.read_bytes()
        if delimiter:
            rows = texts_of_table(location, content, columns, delimiter=delimiter, header=header)
            return [StoredText(*row) for row in rows]
        if ending in OBJECTS:
            return [StoredText(*row) for row in _texts_of_objects(location, content, columns)]
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if not lines:
        raise UsageError(f"{name}: empty; wanted a text on each line")
    return [StoredText(f"{name}:{number}", line.removesuffix(b"\r")) for number, line in enumerate(lines, 1)]


DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""The separator of values, by file extension."""

OBJECTS = (".jsonl", ".ndjson", ".json")
"""The extensions of files with a JSON object on each line, whose keys are columns."""
_BINARY = (".parquet", ".arrow", ".feather", ".gz", ".zip", ".xlsx")


_END = "\0end of the file"


class StoredRow(NamedTuple):
    """A row of a table.

    Attributes:
      line: the number, from 1, of the row's first line in the file; quotes may join several lines.
      values: the texts of the columns.
    """

    line: int
    values: list[str]


def _texts_of_objects(name: str, content: bytes, columns: Template) -> Iterator[tuple[str, str | UsageError]]:
    """Yields the place of each JSON object, as `FILE:LINE`, and its text or the error about it; as `texts_of_table`."""
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{name}: empty; wanted a JSON object on each line")
    for number, line in lines:
        where = f"{name}:{number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield where, UsageError(f"{where}: {error}; wanted a JSON object on each line")
            continue
        if not isinstance(values, dict):
            yield where, UsageError(f"{where}: wanted a JSON object, got {type(values).__name__}")
            continue
        missing = [column for column in columns.columns if column not in values]
        if missing and columns == Template.alone(missing[0]):
            advice = f"write --column {next(iter(values), 'NAME')}"
            raise UsageError(f"{where}: no '{missing[0]}'; it has {', '.join(values) or 'nothing'}; {advice}")
        if missing:
            raise UsageError(f"{where}: no '{missing[0]}'; wanted the columns of the run's {FLAG}")
        try:
            yield where, columns.filled(values, where)
        except UsageError as error:
            yield where, error


def texts_of_table(
    name: str, content: bytes, columns: Template, *, delimiter: str, header: Sequence[str] = ()
) -> Iterator[tuple[str, str | UsageError]]:
    """Yields a pair for each row of a table: its place, as `FILE:LINE`, and its text, made of `columns`.

    For a row with another number of values than the table has columns, the pair holds a UsageError in place of the
    text, which is not raised here. Blank lines are skipped.

    Args:
      name: the name of the file, for the places and messages.
      content: the bytes of the file.
      columns: the template of the text.
      delimiter: the separator of values.
      header: the column names, `--data.header` of the run, for a table whose first line is an example. If the first
        line holds column names nevertheless (`_has_names`), they are used. Empty: the first line holds the names.

    Raises:
      UsageError: the table is not UTF-8, lacks a column or rows, starts with an example in place of names, or is a
        csv file with an unclosed quote. It is raised when the first pair is requested.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8: {error}; convert the file to UTF-8") from error
    rows = _rows(name, text, delimiter)
    first = rows[0].values if rows else []
    if header and not _has_names(first, header):
        names, source = list(header), f", as --data.header of the run has it, and its first line is {','.join(first)}"
    else:
        names, source, rows = first, "", rows[1:]
    if not source and (reason := _like_an_example(names, rows)):
        raise UsageError(
            f"{name}: the first line gives the names of the columns, but it is {','.join(names)}, which looks like an "
            f"example: {reason}; write a line of names above it"
        )
    if missing := [column for column in columns.columns if column not in names]:
        is_alone, only = columns == Template.alone(missing[0]), names[0] if len(names) == 1 else "NAME"
        raise UsageError(
            f"{name}: no column '{missing[0]}'; it has {', '.join(names) or 'nothing'}{source}; "
            + (f"write --column {only}" if is_alone else f"wanted the columns of the run's {FLAG}")
        )
    if not rows:
        raise UsageError(f"{name}: no rows below the names of the columns; wanted a text in each")
    indices = {column: names.index(column) for column in columns.columns}
    for row in rows:
        where = f"{name}:{row.line}"
        if len(row.values) != len(names):
            yield where, UsageError(f"{where}: {len(row.values)} values in {len(names)} columns; wanted one for each")
        else:
            yield where, columns.filled({column: row.values[at] for column, at in indices.items()}, where)


def _has_names(first: Sequence[str], header: Sequence[str]) -> bool:
    """True if `first`, the first line of a table, holds column names, although the run named columns by `header`.

    It does if it has all names of `header`, or at least one of them and another number of values than `header`. Case
    and surrounding spaces are ignored.
    """
    cells, names = {*as_compared(first)}, {*as_compared(header)}
    return names <= cells or (len(first) != len(header) and bool(cells & names))


def _like_an_example(names: Sequence[str], rows: Sequence[StoredRow]) -> str:
    """Finds the reason why the first line of a table, `names`, looks like an example; empty if it does not.

    One of the names is a number, or occurs more than once among the values of its column.
    """
    if number := number_among(names):
        return f"'{number}' is a number"
    for at, name in enumerate(names):
        if sum(name == row.values[at] for row in rows if len(row.values) == len(names)) > 1:
            return f"'{name}' is also a value in its column"
    return ""


def _rows(name: str, text: str, delimiter: str) -> list[StoredRow]:
    """Parses the rows of a table, the first line included; blank lines are skipped.

    Quotes of a tsv file are read as ordinary characters, with a DataWarning, if as quotes they would join lines.

    Raises:
      UsageError: a csv file has an unclosed quote.
    """
    rows, open_at = _read(text, delimiter, csv.QUOTE_MINIMAL)
    if delimiter != "\t":
        if open_at is not None:
            raise UsageError(
                f"{name}:{open_at}: a quote is not closed up to the end of the file; close it, or double it"
            )
        return rows
    # The same rule as for training, in `mpjax.data.sources.huggingface_files`.
    if open_at is None and not any("\n" in value and "\t" in value for row in rows for value in row.values):
        return rows
    message = f"{name}: quotes of the tsv file are read as characters: as quotes, they would join lines to one text"
    warnings.warn(message, DataWarning, stacklevel=2)
    return _read(text, delimiter, csv.QUOTE_NONE)[0]


def _read(text: str, delimiter: str, quoting: int) -> tuple[list[StoredRow], int | None]:
    """Parses the rows of a table, and finds the line, from 1, of a row with an unclosed quote; None if there is none.

    The row with the unclosed quote is left out. `quoting` is a constant of `csv`, such as `csv.QUOTE_MINIMAL`.
    """
    if not text:
        return [], None
    lines = list(io.StringIO(text.removesuffix("\n") + f"\n{_END}\n", newline=""))
    reading = csv.reader(lines, delimiter=delimiter, quoting=quoting)  # pyright: ignore[reportArgumentType]
    rows, line = [], 1
    limit = csv.field_size_limit(len(text) + len(_END) + 1)  # by default, longer texts are an error
    try:
        for values in reading:
            if len(values) > 1 or lines[line - 1].strip(" \t\r\n"):  # blank lines are no rows, as in training
                rows.append(StoredRow(line, values))
            line = reading.line_num + 1
    finally:
        csv.field_size_limit(limit)
    last = rows.pop()
    return rows, None if last.values == [_END] else last.line
