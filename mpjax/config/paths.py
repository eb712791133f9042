"""Paths as the user writes them."""

import os
import pathlib

from mpjax.errors import UsageError


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path with `~` and `~USER` replaced by home folders.

    Raises:
      UsageError: there is no such user, or the text cannot be a file name.
    """
    if "\0" in os.fspath(path):
        raise UsageError(f"{os.fspath(path)!r} is not a path: wanted text without NUL")
    try:
        os.fsencode(path)
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        user = pathlib.Path(path).parts[0]
        raise UsageError(f"{path}: {user} has no home folder; write the folder itself, or ./{path}") from None
    except UnicodeEncodeError:
        raise UsageError(f"{os.fspath(path)!r} is not a path: wanted text without surrogates") from None
