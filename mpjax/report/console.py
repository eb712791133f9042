"""Shows the progress of a run: live on a terminal, as one table in a notebook, and as plain lines elsewhere."""

import atexit
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TextIO

from mpjax import notebook
from mpjax.config.choices import BEST
from mpjax.errors import printable
from mpjax.extend import Writer
from mpjax.report.wording import duration, evaluation_fields, training_fields


def console_writer(
    total_steps: int,
    start_step: int = 0,
    stream: TextIO | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Writer:
    """Opens a live display for a terminal or a notebook, or plain lines for a file, a pipe or a dumb terminal.

    On a terminal the display appears at once; call `close` to end it.

    Args:
      total_steps: the number of attempted steps at which the run ends.
      start_step: the number of attempted steps before the run was resumed.
      stream: the output stream. None: standard output.
      clock: the function that returns the time in seconds, from an arbitrary start.
    """
    target: TextIO = sys.stdout if stream is None else stream
    pace = Pace(total_steps, clock)
    if show := _publisher(target):
        return _LiveTable(total_steps, target, pace, show, clock)
    if target.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        return _LiveConsole(total_steps, start_step, target, pace)
    return _PlainConsole(total_steps, target, pace)


class Pace:
    """Estimates the remaining time of a run from its speed since the first report, which excludes compilation."""

    def __init__(self, total_steps: int, clock: Callable[[], float]):
        self._total_steps, self._clock = total_steps, clock
        self._first: tuple[int, float] | None = None

    def remaining(self, step: int) -> float | None:
        """Estimates the seconds from `step` to the end of the run: 0 at the end, None at the first report.

        The first call starts the clock.
        """
        if step >= self._total_steps:
            return 0.0
        now = self._clock()
        first_step, first_time = self._first = self._first or (step, now)
        if step <= first_step:
            return None
        return (self._total_steps - step) * (now - first_time) / (step - first_step)


class _PlainConsole(Writer):
    """Writes one line for each report, with fields separated by two spaces."""

    def __init__(self, total_steps: int, stream: TextIO, pace: Pace):
        self._total_steps, self._stream, self._pace = total_steps, stream, pace

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if trained := training_fields(metrics):
            eta = ("eta", duration(self._pace.remaining(step)))
            self._line(f"step {step:>5}/{self._total_steps}", *trained, eta)
        if tested := evaluation_fields(metrics):
            self._line("test", ("step", str(step)), *tested)

    def message(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)

    def _line(self, head: str, *fields: tuple[str, str]) -> None:
        self.message("  ".join([head, *(f"{label} {text}" for label, text in fields)]))


class _LiveConsole(Writer):
    """Shows a progress bar above the newest values, redrawn in place. Messages and other prints scroll above it.

    Each write redraws it, because a background thread would take time from the training loop.
    """

    def __init__(self, total_steps: int, start_step: int, stream: TextIO, pace: Pace):
        from rich.console import Console
        from rich.live import Live

        self._total_steps, self._step, self._pace = total_steps, start_step, pace
        self._remaining: float | None = None
        self._trained: list[tuple[str, str]] = []
        self._tested: list[tuple[str, str]] = []
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(get_renderable=self._render, console=self._console, auto_refresh=False)
        # Restores the terminal's cursor if the caller never reaches close().
        atexit.register(self._live.stop)
        self._live.start(refresh=True)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        if trained := training_fields(metrics):
            self._trained, self._remaining = trained, self._pace.remaining(step)
        if tested := evaluation_fields(metrics):
            self._tested = tested
        self._live.refresh()

    def message(self, text: str) -> None:
        self._console.print(printable(text), markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()
        atexit.unregister(self._live.stop)

    def _render(self):
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        total = max(1, self._total_steps)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"step {self._step}/{self._total_steps}",
            ProgressBar(total=total, completed=self._step, width=30),
            f"{self._step / total:.0%}",
            f"eta {duration(self._remaining)}",
        )
        # Train and test scores are aligned, with the other values below, so that the display fits 80 columns.
        quality = [field for field in self._trained if field[0] in BEST]
        others = [field for field in self._trained if field not in quality]
        rows = (("train", quality), ("test", self._tested), ("", others))
        return Group(bar, *(_numbers(head, fields) for head, fields in rows if fields))


def _numbers(head: str, fields: list[tuple[str, str]]):
    """Formats one line of the live display: a head, then labels and values."""
    from rich.text import Text

    line = Text(f"{head:<5}", no_wrap=True, overflow="ellipsis")
    for label, value in fields:
        line.append(f"  {label} ", style="dim").append(value)
    return line


ROWS = 12
"""The number of reports in the table, the newest last."""

PAUSE = 0.25
"""The seconds between two updates, so that a run with many reports does not wait for the browser."""

_Show = Callable[[dict[str, str], bool], None]  # an output by MIME type, and True to replace the previous output


class _LiveTable(Writer):
    """Shows the newest `ROWS` reports of a run as one table, a row for each step. Messages are printed outside it."""

    def __init__(self, total_steps: int, stream: TextIO, pace: Pace, show: _Show, clock: Callable[[], float]):
        self._total_steps, self._stream, self._pace, self._clock = total_steps, stream, pace, clock
        self._show = show
        self._reports: dict[int, dict[str, str]] = {}
        self._count, self._step = 0, 0
        self._remaining: float | None = None
        self._shown_at: float | None = None
        self._current = True

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        trained = training_fields(metrics)
        tested = [(f"test {label}", text) for label, text in evaluation_fields(metrics)]
        if trained:
            self._remaining = self._pace.remaining(step)
        self._count += step not in self._reports
        self._step = step
        self._reports.setdefault(step, {}).update([*trained, *tested])
        while len(self._reports) > ROWS:
            del self._reports[min(self._reports)]
        self._current = False
        if self._shown_at is None or self._clock() - self._shown_at >= PAUSE:
            self._update()

    def message(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)

    def close(self) -> None:
        if not self._current:
            self._update()

    def _update(self) -> None:
        self._show(self._rendered(), self._shown_at is not None)
        self._shown_at, self._current = self._clock(), True

    def _rendered(self) -> dict[str, str]:
        total = max(1, self._total_steps)
        line = f"step {self._step}/{self._total_steps}, {self._step / total:.0%}, eta {duration(self._remaining)}"
        labels = list(dict.fromkeys(label for report in self._reports.values() for label in report))
        rows = [
            [str(step), *(report.get(label, "") for label in labels)] for step, report in sorted(self._reports.items())
        ]
        hidden = self._count - len(rows)
        notes = [f"{hidden} earlier reports are in metrics.jsonl."] if hidden else []
        table = notebook.block(
            notebook.heading(line), notebook.table(["step", *labels], rows), notebook.paragraphs(notes)
        )
        return {"text/html": table, "text/plain": "\n".join([line, *("  ".join(row) for row in rows[-1:])])}


def _publisher(stream: TextIO) -> _Show | None:
    """A function that shows or replaces one output in the notebook that `stream` prints to; None without a notebook.

    IPython is not imported: a notebook has already imported it.
    """
    if not type(stream).__module__.startswith("ipykernel."):
        return None
    publish = getattr(getattr(notebook.running_shell(), "display_pub", None), "publish", None)
    if publish is None:
        return None
    transient = {"display_id": uuid.uuid4().hex}

    def show(data: dict[str, str], update: bool) -> None:
        publish(data=data, metadata={}, transient=transient, update=update)

    return show
