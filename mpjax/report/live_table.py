"""Shows the progress of a run in a notebook: one table that is updated in place."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from mpjax import notebook
from mpjax.errors import printable
from mpjax.report.pace import Pace
from mpjax.report.wording import duration, evaluation_fields, training_fields
from mpjax.report.writer import Writer


if TYPE_CHECKING:
    from mpjax.diagnosis.layers import Layer


ROWS = 12
"""The number of reports that the table shows, the newest last."""

PAUSE = 0.25
"""Seconds between two updates, so that a run with many reports does not wait for the browser."""

_Show = Callable[[dict[str, str], bool], None]  # an output by MIME type; True: in place of the one before


def notebook_writer(total_steps: int, stream: TextIO, pace: Pace, clock: Callable[[], float]) -> Writer | None:
    """Returns the writer for the notebook that `stream` prints to; None if it does not print to one.

    Args:
      total_steps: the number of attempted steps at which the run ends.
      stream: the output stream, for messages.
      pace: the estimate of the remaining time.
      clock: the function that returns the time in seconds, from any start.
    """
    show = _publisher(stream)
    return _LiveTable(total_steps, stream, pace, show, clock) if show else None


def _publisher(stream: TextIO) -> _Show | None:
    """Returns how to show an output in the notebook that `stream` prints to; None if it does not print to one.

    IPython is not imported: in a notebook it is there already.
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


class _LiveTable:
    """A writer that shows the newest reports of a run as one table, a row for each step; messages stand outside."""

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

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        pass  # too many values for the table; they go to the files

    def saved(self, step: int) -> None:
        pass  # the files are in the run's folder

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
