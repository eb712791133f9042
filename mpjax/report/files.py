"""How a run's files are written: whole records, whole files, and errors that name the file."""

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names `path` in an OSError raised inside: a failed write (a full disk) does not know its file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


class AppendFile:
    """A file that grows by whole records.

    Nothing waits in a buffer: a killed run has lost nothing, and a full disk raises here and now, once.
    """

    def __init__(self, path: Path, *, new: bool):
        """Opens `path`, with its folder; with `new` the file must not exist yet."""
        self.path = path
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = io.FileIO(path, "x" if new else "a")

    def append(self, record: bytes) -> None:
        """Writes the bytes of one record.

        Raises:
          OSError: names the file.
        """
        with naming(self.path):
            if os.fstat(self._file.fileno()).st_nlink == 0:  # what is written now goes nowhere
                raise FileNotFoundError(errno.ENOENT, "it was deleted while it was written", str(self.path))
            while record:
                record = record[self._file.write(record) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the file at `path` by `content`: a reader, or a crash, sees the old file or the new one.

    Raises:
      OSError: names the file.
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
