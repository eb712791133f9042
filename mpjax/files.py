"""Writes files safely: appends records, replaces files atomically, locks folders, finds links and unsafe permissions.

The OSErrors of appended and replaced files name the file.
"""

import contextlib
import errno
import io
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from mpjax.errors import UsageError


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context that replaces an OSError without a file name, such as that of a full disk, by one that names `path`.

    An OSError that has a file name or no `errno` passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


class AppendFile:
    """A file to which whole records are appended, without a buffer.

    So a killed process loses no appended record, and a full disk raises in `append`, not again in `close`.
    """

    def __init__(self, path: Path, *, new: bool):
        """Opens `path` for appending, and creates the file and its folders if absent.

        Raises:
          OSError: `path` is a symbolic link, cannot be opened, or exists although `new` is True.
        """
        self.path = path
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = io.FileIO(path, "x" if new else "a", opener=_appending)

    def append(self, record: bytes) -> None:
        """Writes the bytes of one record. If the write fails, the part that was written is removed from the file.

        Raises:
          OSError: the write failed or the file was deleted; the message names the file.
        """
        with naming(self.path):
            before = os.fstat(self._file.fileno())
            if before.st_nlink == 0:  # writes to a deleted file would be lost
                raise FileNotFoundError(errno.ENOENT, "the file was deleted while being written", str(self.path))
            try:
                while record:
                    record = record[self._file.write(record) :]
            except OSError:
                with contextlib.suppress(OSError):  # a device has no size
                    self._file.truncate(before.st_size)
                raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _appending(path: str, flags: int) -> int:
    return _no_link(path, flags | os.O_APPEND)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _sync(folder: Path) -> None:
    """Calls fsync on a folder, so that a new name in it survives a crash; errors are ignored."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context that yields a temporary binary file, and moves it to `path` at the end of the block, synced to disk.

    If the block raises, the temporary file is removed and the old file stays. Missing folders are created.

    Raises:
      OSError: the file cannot be written, or `path` is a link, a folder, a device or a pipe; the message names the
        file.
    """
    with naming(path):
        _require_regular(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            # The name cannot be guessed, and O_EXCL does not follow links.
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _require_regular(path)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` to the file at `path`, which is replaced or created atomically, as by `replacing`."""
    with replacing(path) as file:
        file.write(content)


def _require_regular(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EINVAL, "is a link, a folder or a device: wanted a regular file or none", str(path))


def irregular_in(folder: Path) -> Iterator[Path]:
    """Yields the symbolic links, pipes, sockets and devices at any depth below a folder, without following links."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
                mode = path.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    yield path


def open_to_others(folder: Path, instead: str) -> str:
    """Describes how another user can change the files in a folder, or owns one of them, and what to write; "" if safe.

    The description is of the first danger in the folder, its parents, or the parents of links on the way to it. Root,
    and a group with the user's own name, which usually has no other member, are trusted. In a parent with the sticky
    bit, such as /tmp, other users can only add names, so it is safe. So is a folder below one that others cannot enter.
    On systems without owners of files, every folder is safe.

    Args:
      folder: an existing folder; only its direct entries are checked for other owners.
      instead: the advice that ends the description, such as "another --cache_dir".
    """
    if not hasattr(os, "geteuid"):
        return ""
    with os.scandir(folder) as entries:
        owners = ((entry.path, entry.stat(follow_symlinks=False).st_uid) for entry in entries)
        if foreign := next(((path, owner) for path, owner in owners if owner not in (os.geteuid(), 0)), None):
            return f"{foreign[0]} belongs to user {_named(foreign[1])}: remove it, or write {instead}"
    ways = (folder.resolve(), *_ways(folder.absolute()))
    return next(filter(None, (_open_on(way, instead) for way in ways)), "")


def _ways(path: Path) -> Iterator[Path]:
    """Yields `path` with 0, 1, 2, ... of its symbolic links resolved, the first link in the path first.

    The folders of each are checked, because a user who can replace a link chooses its target.
    """
    yield path
    link = next((place for place in (*reversed(path.parents), path) if place.is_symlink()), None)
    if link is not None:
        yield from _ways(link.parent / link.readlink() / path.relative_to(link))


def _open_on(path: Path, instead: str) -> str:
    for place in (*reversed(path.parents), path):
        state = place.stat()
        if state.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to user {_named(state.st_uid)}: write {instead}"
        others = state.st_mode & (stat.S_IRWXO | (0 if _is_own_group(state.st_gid) else stat.S_IRWXG))
        is_shared = place != path and state.st_mode & stat.S_ISVTX
        if others & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
            return f"other users can write in {place}: write {shlex.join(['chmod', 'go-w', str(place)])}, or {instead}"
        if not others & (stat.S_IXGRP | stat.S_IXOTH):
            break
    return ""


def _named(user: int) -> str:
    import pwd  # on Unix alone

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _is_own_group(number: int) -> bool:
    import grp  # on Unix alone

    try:
        return number == 0 or grp.getgrgid(number).gr_name == _named(os.geteuid())
    except KeyError:
        return False


@contextlib.contextmanager
def locked(folder: Path, holder: Callable[[], str]) -> Iterator[None]:
    """Context that holds an exclusive lock on a run's folder; it never waits for the lock.

    Where the system or the file system has no locks, nothing is locked. The lock ends with the process at the latest.

    Args:
      folder: the run's folder.
      holder: describes the process that holds the lock, for the error message.

    Raises:
      UsageError: another process holds the lock.
      OSError: the folder does not exist.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(opened):
            raise UsageError(
                f"{folder} is in use by {holder()}: wait until it ends, stop it, or use another --output_dir"
            )
        yield
    finally:
        os.close(opened)


def _lock(opened: int) -> bool:
    """Locks a folder, given as a file descriptor; False if another process holds the lock, True without locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems do not support locks
        return True
    return True
