"""Writes the files of a run: whole records, whole files, and errors that name the file."""

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError raised inside, because a failed write (a full disk) does not name its file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


class AppendFile:
    """A file that grows by whole records.

    It is unbuffered: a killed run loses nothing, and a full disk raises once, in `append`.
    """

    def __init__(self, path: Path, *, new: bool):
        """Opens `path` and creates its folder. If `new`, the file must not exist yet."""
        self.path = path
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = io.FileIO(path, "x" if new else "a")

    def append(self, record: bytes) -> None:
        """Writes the bytes of one record.

        Raises:
          OSError: the write failed or the file was deleted; the message names the file.
        """
        with naming(self.path):
            if os.fstat(self._file.fileno()).st_nlink == 0:  # writes to a deleted file would be lost
                raise FileNotFoundError(errno.ENOENT, "the file was deleted while being written", str(self.path))
            while record:
                record = record[self._file.write(record) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable if the file system supports it."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the content of the file at `path` atomically: a reader, or a crash, sees the old file or the new one.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
