"""One process at a time writes a run: a lock that goes with the process, whatever ends it."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

from mpjax.errors import UsageError


@contextlib.contextmanager
def locked(folder: pathlib.Path, holder: Callable[[], str]) -> Iterator[None]:
    """Holds the lock of a run's folder, where the system has such locks.

    Args:
      folder: of the run.
      holder: says who holds it, should another process do so.

    Raises:
      UsageError: another process holds it.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(opened):
            raise UsageError(
                f"{folder} is in use by {holder()}: wait until that ends, or end it; or take another --output_dir"
            )
        yield
    finally:
        os.close(opened)


def _lock(opened: int) -> bool:
    """Takes the lock; False if another process has it."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return True
    return True
