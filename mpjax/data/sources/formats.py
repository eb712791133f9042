"""The formats of files that `hf:PATH` reads, and what to write for a file of another one."""

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
"""The format of a file by the end of its name."""

FORMATS = ("csv", "tsv", "json", "parquet", "arrow", "imagefolder", "text")
"""What may stand before the colon of `hf:FORMAT:PATH`."""

BY_FUNCTION = (
    "write --data.name FILE.py:NAME with a function that reads it and returns (train, test), each a dict of arrays"
)
"""Advice on data of a format that no reader here knows."""


def is_readable(path: pathlib.Path) -> bool:
    """Returns True if `hf:PATH` reads a file, or one in a folder, without the name of a format."""
    files = path.rglob("*") if path.is_dir() else [path]
    return any(file.suffix in KINDS for file in files)


def way_to_read(file: pathlib.Path) -> str:
    """Returns advice on a file whose name does not tell its format: the formats that its first bytes allow."""
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
