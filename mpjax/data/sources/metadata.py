"""Reads the table of a folder of files: metadata.csv or metadata.jsonl, with a row for each file."""

import csv
import io
import json
import pathlib

from mpjax.data.sources.files_by_class import FileKind
from mpjax.errors import UsageError


NAMES = ("metadata.csv", "metadata.jsonl")
FILE_NAME = "file_name"


def metadata_in(folder: pathlib.Path) -> pathlib.Path | None:
    """Finds the table of a folder; None if it has none. Raises UsageError if it has both."""
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise UsageError(f"{folder} has {' and '.join(NAMES)}: wanted one; remove or rename the other")
    return found[0] if found else None


def read_metadata(file: pathlib.Path) -> list[dict[str, str]]:
    """Reads the rows of a table, each with a `file_name`, the path of a file below the folder, and texts.

    Raises:
      UsageError: the table is not UTF-8, damaged or empty, a row lacks the column or has another number of cells, or
        two rows have one file. The message names the file and the line.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8: {error}; convert it to UTF-8") from error
    rows = _of_csv(file, text) if file.suffix == ".csv" else _of_lines(file, text)
    if not rows:
        raise UsageError(f"{file}: has no rows; wanted one for each file")
    seen: dict[str, int] = {}
    for line, row in rows:
        name = row[FILE_NAME] = pathlib.PurePosixPath(row[FILE_NAME]).as_posix()  # ./a.wav is a.wav
        if pathlib.PurePath(name).is_absolute() or ".." in pathlib.PurePath(name).parts:
            raise UsageError(f"{file}, line {line}: {FILE_NAME} {name}: wanted a path below {file.parent}")
        if name in seen:
            raise UsageError(f"{file}, lines {seen[name]} and {line}: both are of {name}; remove one of them")
        seen[name] = line
    return [row for _, row in rows]


def told_without_row(table: pathlib.Path, rows: int, kind: FileKind, split: str) -> list[str]:
    """Says, in a list of at most one sentence, how many files of a kind beside and below a table have no row in it."""
    there = sum(path.suffix.lower() in kind.endings for path in table.parent.rglob("*"))
    if there <= rows:
        return []
    return [f"{split}: {there - rows:,} {kind.name} in {table.parent} have no row in {table.name} and are left out"]


def _of_csv(file: pathlib.Path, text: str) -> list[tuple[int, dict[str, str]]]:
    reader = csv.reader(io.StringIO(text), strict=True)
    rows: list[tuple[int, dict[str, str]]] = []
    try:
        header = next(reader, [])
        if FILE_NAME not in header or len({*header}) < len(header):
            raise UsageError(
                f"{file}: its first line is {','.join(header)[:80]}; wanted names of columns, each once, and "
                f"{FILE_NAME} among them"
            )
        for cells in filter(None, reader):
            if len(cells) != len(header):
                raise UsageError(
                    f"{file}, line {reader.line_num}: {len(cells)} cells, and the first line has {len(header)}; put "
                    "cells with commas into quotation marks"
                )
            rows.append((reader.line_num, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        raise UsageError(f"{file}, line {reader.line_num}: {error}; repair it") from error
    return rows


def _of_lines(file: pathlib.Path, text: str) -> list[tuple[int, dict[str, str]]]:
    rows = []
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file}, line {line}: {error}; wanted a JSON object") from error
        if not isinstance(row, dict) or not isinstance(row.get(FILE_NAME), str):
            raise UsageError(f'{file}, line {line}: wanted a JSON object with a text "{FILE_NAME}"')
        rows.append((line, {key: value for key, value in row.items() if isinstance(value, str)}))
    return rows
