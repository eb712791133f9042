"""The file formats of `hf:PATH`, and advice on files of other formats."""

import pathlib
from collections.abc import Mapping


KINDS: Mapping[str, str] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""The format of a file by its extension."""

FORMATS = ("csv", "tsv", "json", "parquet", "arrow", "imagefolder", "text")
"""The formats of `hf:FORMAT:PATH`."""

BY_FUNCTION = (
    "write --data.name FILE.py:NAME with a function that reads it and returns (train, test), each a dict of arrays"
)
"""Advice on data in a format without a reader here."""


def kind_of(file: pathlib.Path) -> str:
    """The format of a file by its extension, in either case; empty if unknown."""
    return KINDS.get(file.suffix.lower(), "")


def is_readable(path: pathlib.Path) -> bool:
    """True if the extension of a file, or of any file below a folder, is one that `hf:PATH` reads."""
    if not path.is_dir():
        return bool(kind_of(path))
    return any(file.suffix in KINDS for file in path.rglob("*"))  # `datasets` finds only lower case in a folder


def way_to_read(file: pathlib.Path) -> str:
    """Advice on how to read a file whose name does not reveal its format, by the formats that its first bytes allow."""
    with file.open("rb") as opened:
        first = opened.read(4096)
    if first.startswith(b"PAR1"):
        formats = ["parquet"]
    elif first.startswith(b"ARROW1"):
        formats = ["arrow"]
    elif b"\0" in first:
        return BY_FUNCTION
    else:
        formats = ["csv", "tsv", "json", "text"]
    return f"write --data.name hf:FORMAT:{file} with {' or '.join(formats)} for FORMAT"
