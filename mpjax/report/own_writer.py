"""Keeps the failure of a user's writer until a callback can raise it, which ends a run with a checkpoint."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpjax.errors import CallbackError, LoggerWarning, failure
from mpjax.report.writer import Writer


if TYPE_CHECKING:
    import numpy as np

    from mpjax.diagnosis.layers import Layer


class OwnWriter:
    """A user's writer whose first failure is kept. After it, nothing more is passed on except `close`.

    Attributes:
      failure: the first error, with a message that names the writer; None if the writer has not failed.
    """

    def __init__(self, writer: Writer):
        self.failure: CallbackError | None = None
        self._writer: Any = writer

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forwards the metrics."""
        self._pass("write", step, metrics)

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        """Forwards the statistics."""
        self._pass("layers", step, layers)

    @property
    def takes_images(self) -> bool:
        """True if the writer has a method `images`."""
        return callable(getattr(self._writer, "images", None))

    def images(self, step: int, images: "Mapping[str, np.ndarray]") -> None:
        """Forwards images, if the writer takes them."""
        if self.takes_images:
            self._pass("images", step, images)

    def saved(self, step: int) -> None:
        """Forwards the step."""
        self._pass("saved", step)

    def message(self, text: str) -> None:
        """Forwards the text."""
        self._pass("message", text)

    def close(self) -> None:
        """Closes the writer, even after a failure."""
        self._call("close")

    def _pass(self, method: str, *arguments: Any) -> None:
        if self.failure is None:
            self._call(method, *arguments)

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self._writer, method)(*arguments)
        except (Exception, SystemExit) as error:
            if self.failure is None:
                step = f" at step {arguments[0]}" if arguments and isinstance(arguments[0], int) else ""
                self.failure = CallbackError(f"writer {type(self._writer).__name__}.{method}{step}: {failure(error)}")
                self.failure.__cause__ = error


class Failures:
    """A callback that raises the failures of writers: all processes of a run end together, with a checkpoint."""

    def __init__(self):
        self._writers: list[OwnWriter] = []
        self._raised: list[OwnWriter] = []

    def of(self, writer: Writer) -> OwnWriter:
        """Wraps a writer whose failure is raised at the next event."""
        self._writers.append(own := OwnWriter(writer))
        return own

    def untold(self) -> Iterator[CallbackError]:
        """Yields failures that were not yet raised, and marks them as raised."""
        for writer in self._writers:
            if writer.failure is not None and writer not in self._raised:
                self._raised.append(writer)
                yield writer.failure

    @contextlib.contextmanager
    def warned_of(self) -> Iterator["Failures"]:
        """Warns of failures that were never raised, if the body raises. Yields this object."""
        try:
            yield self
        except BaseException:
            for untold in self.untold():
                warnings.warn(str(untold), LoggerWarning, stacklevel=2)
            raise

    def _heard(self, *_: Any) -> None:
        for untold in self.untold():
            raise untold

    started: Callable = _heard
    logged: Callable = _heard
    skipped: Callable = _heard
    evaluated: Callable = _heard
    saved: Callable = _heard
    diverged: Callable = _heard
    ended: Callable = _heard
