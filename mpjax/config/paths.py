"""What a user writes as a path."""

import os
import pathlib

from mpjax.errors import UsageError


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path with `~` and `~USER` as folders.

    Raises:
      UsageError: there is no such user, or a text that no file can have as its name.
    """
    try:
        os.fsencode(path)
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        user = pathlib.Path(path).parts[0]
        raise UsageError(f"{path}: {user} has no home folder; write the folder itself, or ./{path}") from None
    except UnicodeEncodeError:
        raise UsageError(f"{os.fspath(path)!r} is no path: wanted text without surrogates") from None
