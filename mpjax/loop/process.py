"""One process to a run: the signals that stop it, and the lock on its folder."""

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator

from mpjax.errors import UsageError


class StopRequest:
    """Which signal asked to stop; None while none did."""

    def __init__(self):
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within it, the first SIGINT or SIGTERM is recorded instead of ending the process."""
    request = StopRequest()

    def record(signal_number: int, frame) -> None:
        request.signal_number = signal_number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C again means now

    if threading.current_thread() is not threading.main_thread():
        yield request  # Python allows handlers in the main thread only; elsewhere the caller handles signals
        return
    before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM end the process as they do without `stop_on_signals`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
