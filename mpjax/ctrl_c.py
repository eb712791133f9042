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
"""The seconds that the main thread has to handle an interrupt itself."""

_SHOW_CURSOR = "\x1b[?25h"


class _Answers:
    count = 0


def answered() -> None:
    """Records that a handler has handled an interrupt."""
    _Answers.count += 1


def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Raises KeyboardInterrupt: the handler of SIGINT that ends the program."""
    answered()
    raise KeyboardInterrupt


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Context in which SIGINT ends the process within a second, even inside XLA, which may compile for minutes.

    SIGINT raises KeyboardInterrupt. If the main thread cannot run a Python handler, the process ends with exit code
    130. If another handler is installed, which may only set a flag, the second SIGINT ends the process.

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
    """Reads signal numbers from a pipe until it is closed, and ends the process if no handler answers a SIGINT.

    `count` is the number of interrupts answered before.
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
