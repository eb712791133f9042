"""Reads and writes the file of a run that stores what its columns become, by which every later command reads rows."""

import hashlib
import pathlib

from mpjax.data.encoding import Encoding
from mpjax.errors import UsageError
from mpjax.loop.stored import CHECKPOINTS, complete_checkpoints


ENCODING_FILE = "columns.json"
"""The file in a run's folder with the statistics of its training split."""

_NONE = b"null\n"


def encoded_as(encoding: Encoding | None) -> bytes:
    """The content of the file; `null` if the user's own source has none."""
    return encoding.to_json() if encoding else _NONE


def digest_of_encoding(encoding: Encoding | None) -> str:
    """Computes the SHA-256 of the file's content, in hexadecimal."""
    return _digest(encoded_as(encoding))


def verify_encoding(folder: pathlib.Path, digest: str) -> None:
    """Checks that the file in a run's folder is the one by which a checkpoint was trained.

    Raises:
      UsageError: the file has another digest. Its rows would become other inputs and targets.
    """
    file = folder / ENCODING_FILE
    if _digest(file.read_bytes()) != digest:
        raise UsageError(
            f"{file} has changed since the checkpoint was saved: the model would read other inputs and targets; copy "
            "the file of the run there, or train again"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def encoding_of(folder: pathlib.Path) -> Encoding | None:
    """Reads the statistics of a run; None if the user's own source had none.

    Raises:
      UsageError: the file is missing or damaged: statistics of other data would change what the model is given.
    """
    file = folder / ENCODING_FILE
    if not file.exists():
        raise UsageError(
            f"{file} is missing, which has the statistics that the run standardised its columns by; copy it there, or "
            "train again"
        )
    content = file.read_bytes()
    return None if content == _NONE else Encoding.from_json(content, str(file))


def encoding_to_resume(folder: pathlib.Path) -> Encoding | None:
    """Reads the statistics of a run to resume; None if it has neither checkpoints nor the file, as if it were new."""
    if not (folder / ENCODING_FILE).exists() and not complete_checkpoints(folder / CHECKPOINTS):
        return None
    return encoding_of(folder)
