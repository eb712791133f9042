"""The file formats of `hf:PATH`, and advice on files of other formats."""

import pathlib
from collections.abc import Mapping

from mpjax.config.choices import NPZ


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
"""The format of a file, one of `FORMATS`, by its extension in lower case."""

FORMATS = ("csv", "tsv", "json", "parquet", "arrow", "imagefolder", "text")
"""The formats of `hf:FORMAT:PATH`."""

BY_FUNCTION = (
    "write --data.name FILE.py:NAME with a function that reads it and returns (train, test), each a dict of arrays"
)
"""Advice on data in a format without a reader here."""


def kind_of(file: pathlib.Path) -> str:
    """Looks up the format of a file by its extension, in upper or lower case; empty if unknown."""
    return KINDS.get(file.suffix.lower(), "")


def is_readable(path: pathlib.Path) -> bool:
    """True if the extension of a file, or of any file below a folder, is one that `hf:PATH` reads.

    Below a folder, only extensions in lower case count.
    """
    if not path.is_dir():
        return bool(kind_of(path))
    return any(file.suffix in KINDS for file in path.rglob("*"))  # `datasets` finds only lower case in a folder


def has_tars(path: pathlib.Path) -> bool:
    """True for a tar file, and for a folder with tar files in it or in its folders."""
    if not path.is_dir():
        return path.suffix.lower() == ".tar"
    return any(next(path.glob(pattern), None) for pattern in ("*.tar", "*/*.tar"))


def way_to_read(file: pathlib.Path) -> str:
    """Formats advice on how to read a file whose extension is unknown, with the formats that its first bytes allow.

    It reads up to 4,096 bytes. A binary file of an unknown format gets the advice `BY_FUNCTION`.
    """
    if has_tars(file):
        return f"write --data.name webdataset:{file}"
    if file.suffix.lower() == NPZ:
        return f"write --data.name {file}"
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
