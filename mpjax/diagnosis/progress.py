"""Shows the progress of a diagnosis: a bar on a terminal if it takes a while, nothing elsewhere."""

import collections
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO


SHOWN_AFTER = 1.0
"""Seconds before the bar appears."""

_BETWEEN = 0.1  # minimum seconds between redraws


class _Bar:
    """A progress bar of one line, redrawn in place after an operation and erased at the end; it uses no thread."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]):
        from rich import progress
        from rich.console import Console

        self._clock, self._shown_from, self._drawn = clock, clock() + SHOWN_AFTER, float("-inf")
        self._attempts: collections.Counter[str] = collections.Counter()
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("operations"),
            progress.TimeElapsedColumn(),
            console=Console(file=stream, force_terminal=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def start(self, what: str, total: int, *, counted: bool) -> None:
        """Restarts the bar for a run of `total` operations.

        With `counted`, the text gets the number of times that `what` was started.
        """
        self._attempts[what] += 1
        text = f"{what}, attempt {self._attempts[what]}" if counted else what
        self._bar.update(self._task, description=text, total=total, completed=0)
        self._draw()

    def advance(self) -> None:
        self._bar.advance(self._task)
        self._draw()

    def stop(self) -> None:
        self._bar.stop()

    def _draw(self) -> None:
        """Redraws the bar, but not in the first `SHOWN_AFTER` seconds, nor within `_BETWEEN` seconds of the last."""
        now = self._clock()
        if now < max(self._shown_from, self._drawn + _BETWEEN):
            return
        self._drawn = now
        self._bar.start()
        self._bar.refresh()


@dataclasses.dataclass(frozen=True)
class Progress:
    """Reports the progress of the emulated runs of a step to a bar.

    Attributes:
      bar: the progress bar; None shows nothing.
      attempts: the text shown for runs that take no readings.
    """

    bar: _Bar | None = None
    attempts: str = "searching for a repair"

    def started(self, what: str | None, total: int) -> Callable[[], None]:
        """Restarts the bar for an emulated run. Returns the function to call after each operation of the run.

        Without a bar, the function does nothing.

        Args:
          what: the text shown for the run; None shows `attempts` with the number of the attempt.
          total: the number of operations in the run.
        """
        if self.bar is None:
            return _nothing
        self.bar.start(what or self.attempts, total, counted=what is None)
        return self.bar.advance

    def verifying(self) -> "Progress":
        """Copies the progress, with the same bar, for runs that verify rules: they are shown as "verifying"."""
        return dataclasses.replace(self, attempts="verifying")


def _nothing() -> None:
    pass


SILENT = Progress()
"""Shows nothing."""


@contextlib.contextmanager
def progress_at(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Context that shows a progress bar if `stream`, by default stderr, is a terminal that can redraw lines.

    A terminal cannot if $TERM is "dumb" or "unknown". The bar appears after `SHOWN_AFTER` seconds on `clock`, and is
    erased at the end. Yields the `Progress` to report to; `SILENT` if there is no such terminal.
    """
    target = sys.stderr if stream is None else stream
    if target is None or not target.isatty() or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        yield SILENT
        return
    bar = _Bar(target, clock)
    try:
        yield Progress(bar)
    finally:
        bar.stop()
