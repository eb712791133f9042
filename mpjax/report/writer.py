"""The writers of a run as one: `Writers` forwards to several, and `open_writers` opens the run's own."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpjax.extend import Writer
from mpjax.report.console import console_writer
from mpjax.report.jsonl import JsonlWriter
from mpjax.report.tensorboard import TensorBoardWriter


if TYPE_CHECKING:
    import numpy as np

    from mpjax.diagnosis.layers import Layer


class Writers(Writer):
    """A writer that forwards each call to several writers, in order. An error of one is raised at once.

    `Writers()` writes nothing, for processes without output.
    """

    def __init__(self, writers: Iterable[Any] = ()):
        self._writers = tuple(writers)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._forward("write", step, metrics)

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        self._forward("layers", step, layers)

    def images(self, step: int, images: "Mapping[str, np.ndarray]") -> None:
        self._forward("images", step, images)

    def saved(self, step: int) -> None:
        self._forward("saved", step)

    def message(self, text: str) -> None:
        self._forward("message", text)

    def close(self) -> None:
        """Closes every writer, in reverse order, even if one fails. Then raises the last failure, if any."""
        with contextlib.ExitStack() as closed:
            for writer in self._writers:
                closed.callback(writer.close)

    @property
    def takes_images(self) -> bool:
        """True if any of the writers takes images."""
        return any(writer.takes_images for writer in self._writers)

    def _forward(self, method: str, *arguments: Any) -> None:
        for writer in self._writers:
            getattr(writer, method)(*arguments)


def open_writers(
    run_dir: str | os.PathLike[str], total_steps: int, resume_step: int | None = None, *, tensorboard: bool = True
) -> Writers:
    """Opens metrics.jsonl, optional TensorBoard events and the console. If no step is left, opens only the console.

    Folders are created. If one writer cannot be opened, those before it are closed.

    Args:
      run_dir: the run's folder; events go to its subfolder `tensorboard`.
      total_steps: the number of attempted steps at which the run ends.
      resume_step: the step of the checkpoint that the run resumes from. None: a new run.
      tensorboard: True to write TensorBoard events.

    Raises:
      UsageError: a new run would overwrite the metrics of an earlier run, or a line of a resumed run's metrics is
        damaged.
      OSError: a file cannot be written; the message names the file.
    """
    folder = Path(run_dir)
    if resume_step is not None and resume_step >= total_steps:
        return Writers([console_writer(total_steps, start_step=resume_step)])
    openers: list[Callable[[], Writer]] = [lambda: JsonlWriter(folder / "metrics.jsonl", resume_step)]
    if tensorboard:
        openers.append(lambda: TensorBoardWriter(folder / "tensorboard", resume_step))
    # The console is last, so that an error above leaves no live display on the terminal.
    return Writers(open_all([*openers, lambda: console_writer(total_steps, start_step=resume_step or 0)]))


def open_all(openers: Iterable[Callable[[], Any]]) -> list[Any]:
    """Opens writers in order. If one cannot be opened, closes those before it and raises the error."""
    writers = []
    with contextlib.ExitStack() as opened:
        for opener in openers:
            writers.append(opener())
            opened.callback(writers[-1].close)
        opened.pop_all()
    return writers
