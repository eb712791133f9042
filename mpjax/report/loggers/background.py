"""Runs an experiment logger in its own thread, so that a slow or broken logger never delays a run."""

import contextlib
import importlib.util
import pathlib
import queue
import threading
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.save import flat, to_toml
from mpjax.config.schema import Config
from mpjax.errors import LoggerWarning, UsageError, first_line
from mpjax.extend import Writer


class Logger(Writer):
    """A writer to an experiment logger. `InBackground` calls it in one thread. Each method may raise any exception."""

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        """Sends files of the run's folder to the logger, at the end of the run."""


FILES = (
    "config.toml",
    "history.jsonl",
    "environment.json",
    "receipt.json",
    "summary.json",
    "curves.png",
    "diagnosis_*",
)
"""The files of a run's folder that loggers store at its end."""

PATIENCE = 60.0
"""The seconds to wait for a logger at the end of a run."""


class InBackground(Writer):
    """A writer that calls a logger in a thread of its own, so that `write` returns at once.

    No method raises an error of the logger. After the first failure nothing more is sent, and the next call, or
    `close`, warns once (`LoggerWarning`). The thread starts at once. Messages and layer statistics are not sent.

    Args:
      name: the name of the logger, for messages.
      open_logger: opens the logger; called in that thread, where it may fail too.
      folder: the folder of the run.
      patience: the seconds to wait at the end until everything is sent.
    """

    def __init__(
        self, name: str, open_logger: Callable[[], Logger], folder: pathlib.Path, *, patience: float = PATIENCE
    ):
        self._name, self._folder, self._patience = name, folder, patience
        self._work: queue.SimpleQueue[Callable[[Logger], Any] | None] = queue.SimpleQueue()
        self._failure: str | None = None
        self._told = self._closed = False
        self._thread = threading.Thread(target=self._run, args=(open_logger,), daemon=True, name=name)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(lambda logger: logger.write(step, dict(metrics)))

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self._put(lambda logger: logger.images(step, dict(images)))

    def close(self) -> None:
        """Sends the files of the run (`FILES`), and waits until everything is sent, at most `patience` seconds.

        Warns if not everything is sent by then. Further calls do nothing.
        """
        if self._closed:
            return
        self._closed = True
        paths = [path for pattern in FILES for path in sorted(self._folder.glob(pattern))]
        self._work.put(lambda logger: logger.files(paths))
        self._work.put(None)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._warn(f"not everything is sent after {self._patience:g} s")
        self._tell()

    def _put(self, work: Callable[[Logger], None]) -> None:
        self._tell()
        if not self._failure:
            self._work.put(work)

    def _run(self, open_logger: Callable[[], Logger]) -> None:
        try:
            logger = open_logger()
            with contextlib.closing(logger):
                while (work := self._work.get()) is not None:
                    work(logger)
        except Exception as error:  # the logger's package may raise any exception
            self._failure = first_line(error)

    def _tell(self) -> None:
        """Warns of the logger's failure, once."""
        if self._failure and not self._told:
            self._told = True
            self._warn(f"{self._failure}; nothing more is sent, and the run goes on")

    def _warn(self, text: str) -> None:
        warnings.warn(f"{self._name}: {text}", LoggerWarning, stacklevel=3)


def require_package(name: str, package: str) -> None:
    """Raises UsageError if the package of a logger is not installed. Does not import it."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--report.writers {name}: the package is not installed; write pip install 'mpjax[{name}]'")


def stored_id(file: pathlib.Path) -> str | None:
    """Reads a logger's id of a run, under which a resumed run continues; None if there is no file, as in a new run."""
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def flat_settings(config: Config) -> dict[str, Any]:
    """The settings of a run by their full names, such as `precision.policy`, in one dict without levels."""
    return dict(flat(tomllib.loads(to_toml(config))))
