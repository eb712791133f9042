"""Stops a run after its current step on SIGINT or SIGTERM, instead of in the middle of it."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from mpjax.ctrl_c import answered, interrupt


class Stop(Protocol):
    """A request to stop a run after a step: `StopRequest` in a run of one process, and else `Company`."""

    @property
    def signal_number(self) -> int | None:
        """The number of the signal that arrived; None before."""
        ...

    def ask(self, signal_number: int) -> None:
        """Requests the stop. A signal handler may call it."""
        ...

    def due(self, position: int) -> bool:
        """True if the run stops after step number `position`. It may wait for other processes to agree."""
        ...


class StopRequest:
    """A request to stop a run of one process. The object is true once a signal has arrived.

    Attributes:
      signal_number: the number of the last signal that arrived; None before.
    """

    def __init__(self):
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def ask(self, signal_number: int) -> None:
        """Records the signal, in place of an earlier one."""
        self.signal_number = signal_number

    def due(self, position: int) -> bool:
        """True once a signal has arrived, whatever the position."""
        return bool(self)


@contextlib.contextmanager
def handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Context with a handler for each of some signals, which restores the earlier ones. In the main thread alone."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """Context in which the first SIGINT or SIGTERM calls `stop.ask`, and the process continues.

    After it, SIGINT raises KeyboardInterrupt, and SIGTERM calls `stop.ask` again. At its end, the context restores the
    earlier handlers. Outside the main thread it does nothing.
    """

    def record(signal_number: int, frame) -> None:
        stop.ask(signal_number)
        if signal_number == signal.SIGINT:
            answered()
        signal.signal(signal.SIGINT, interrupt)  # a second Ctrl-C ends the process at once

    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows signal handlers only in the main thread; elsewhere the caller handles signals
        return
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), record)):
        yield


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    """Context in which SIGINT raises KeyboardInterrupt and SIGTERM ends the process, as without `stop_on_signals`.

    At its end, the context restores the earlier handlers. Outside the main thread it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handled({signal.SIGINT: interrupt, signal.SIGTERM: signal.SIG_DFL}):
        yield
