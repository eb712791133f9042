"""Handles Ctrl-C even while the main thread is inside XLA, where Python runs no signal handler."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


PATIENCE = 0.5
"""The seconds in which the main thread has to run a Python handler for a SIGINT."""

_SHOW_CURSOR = "\x1b[?25h"


class _Answers:
    count = 0


def answered() -> None:
    """Records that a Python handler has run for one SIGINT; each handler inside `ended_by_interrupts` calls it."""
    _Answers.count += 1


def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Handles SIGINT: calls `answered` and raises KeyboardInterrupt, which ends the program."""
    answered()
    raise KeyboardInterrupt


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Context in which SIGINT ends the process within a second, even inside XLA, which may compile for minutes.

    SIGINT raises KeyboardInterrupt. If the main thread runs no Python handler within `PATIENCE` seconds, a second
    thread ends the process with exit code 130. If another handler than `interrupt` is installed, such as one that only
    sets a flag, the first SIGINT that it cannot handle in time prints a line, and the second one ends the process. At
    the end of the context, the earlier handler of SIGINT is installed again.

    Use it in programs only: the process ends without cleaning up, which would also end a notebook. Outside the main
    thread it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    handler, count = signal.signal(signal.SIGINT, interrupt), _Answers.count
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading, count), daemon=True, name="interrupts").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, handler)
        os.close(writing)  # ends the thread


def _watch(reading: int, count: int) -> None:
    """Reads signal numbers from a pipe until it is closed, and ends the process if no Python handler runs for a SIGINT.

    If another handler than `interrupt` is installed, only the second SIGINT without a run ends the process; the first
    prints a line. `count` is the number of calls of `answered` before.
    """
    with open(reading, "rb", buffering=0) as signals:
        while numbers := signals.read(1):
            if numbers[0] != signal.SIGINT:
                continue
            count += 1
            time.sleep(PATIENCE)
            waiting = count - _Answers.count
            if waiting > 1 or (waiting == 1 and signal.getsignal(signal.SIGINT) is interrupt):
                _end()
            if waiting == 1:
                print("stopping after this step; Ctrl-C again ends at once", file=sys.stderr, flush=True)


def _end() -> NoReturn:
    if sys.stdout is not None and sys.stdout.isatty():
        print(end=_SHOW_CURSOR, flush=True)
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)
