"""Opens a user's writers by name, checks them, and calls them so that a failure ends the run with a checkpoint."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mpjax.config.user_calls import arguments_of, named_failure, require_call
from mpjax.config.user_code import Code, load_function
from mpjax.errors import CallbackError, LoggerWarning, UsageError, failure
from mpjax.extend import RunInfo, Writer
from mpjax.loop.callbacks import at_step
from mpjax.report.writer import Writers, open_all


LOGGERS = {
    "wandb": "mpjax.report.loggers.weights_and_biases:open_wandb",
    "mlflow": "mpjax.report.loggers.mlflow:open_mlflow",
    "comet": "mpjax.report.loggers.comet:open_comet",
}
"""The writers that need additional packages."""

_REQUIRED = ("write", "layers", "saved", "message", "close")
"""The methods that an object needs to be a writer; `images` is optional."""


def open_named_writers(specs: Sequence[Code], run: RunInfo) -> list[Any]:
    """Opens the writers that `--report.writers` names, in order.

    Raises:
      UsageError: there is no such code, it fails, or its result is no writer. The writers opened before are then
        closed.
    """
    return open_all(openers_of(specs, run))


def openers_of(specs: Sequence[Code], run: RunInfo) -> list[Callable[[], Any]]:
    """Builds a function for each of `specs` that opens its writer. The code is loaded when the function is called."""
    return [functools.partial(_open, spec, run) for spec in specs]


def _open(spec: Code, run: RunInfo) -> Any:
    """Loads the code that `spec` names, calls it with `run`, and checks that the result is a writer."""
    code = LOGGERS.get(spec) if isinstance(spec, str) and ":" not in spec else spec
    if code is None:
        raise UsageError(
            f"--report.writers {spec}: wanted {', '.join(LOGGERS)}, or FILE.py:NAME or package.module:NAME for your own"
        )
    opener = load_function(code, flag="--report.writers")
    with named_failure(f"--report.writers {spec} failed", opener):
        writer = opener(run)
    require_writer(writer, f"--report.writers {spec} returned")
    return writer


def require_writer(writer: Any, source: str) -> None:
    """Raises UsageError if an object is no writer.

    Args:
      writer: the object.
      source: the beginning of the message; a description of the object follows.
    """
    expected = "wanted an object with the methods of mpjax.report.Writer"
    if isinstance(writer, type):
        raise UsageError(f"{source} the class {writer.__name__}; {expected}: write {writer.__name__}(...)")
    if isinstance(writer, str):
        raise UsageError(f"{source} the text {writer!r}; {expected}; names of loggers are for --report.writers")
    kind = type(writer).__name__
    if missing := [name for name in _REQUIRED if not _has(writer, name)]:
        raise UsageError(f"{source} {kind}, which has no {', '.join(missing)}; {expected}")
    for name in _REQUIRED:
        require_call(getattr(writer, name), arguments_of(getattr(Writer, name)), f"{source} {kind}, whose {name}")


def _has(writer: Any, method: str) -> bool:
    """True if an object has this method."""
    return callable(getattr(writer, method, None))


class UserWriters(Writers):
    """Forwards to a user's writers.

    After its first failure, a writer is only closed. A failure is not raised at the call: other processes have other
    writers, and would wait for this one. `Callbacks` raises it in all of them, at the next event.

    Args:
      writers: objects with the methods of `Writer`; `images` is optional.
      failures: receives the first failure of each writer, with a message that names the writer.
    """

    def __init__(self, writers: Iterable[Any], failures: list[CallbackError]):
        super().__init__(writers)
        self._failures = failures
        self._failed: set[int] = set()

    def close(self) -> None:
        """Closes all writers in reverse order, also those that failed. Failures are recorded and not raised."""
        for writer in reversed(self._writers):
            self._call(writer, "close")

    @property
    def takes_images(self) -> bool:
        """True if any of the writers takes images. One without this property does if it has `images`."""
        return any(getattr(writer, "takes_images", _has(writer, "images")) for writer in self._writers)

    def _forward(self, method: str, *arguments: Any) -> None:
        for writer in self._writers:
            if id(writer) not in self._failed and _has(writer, method):
                self._call(writer, method, *arguments)

    def _call(self, writer: Any, method: str, *arguments: Any) -> None:
        """Calls a method of a writer. Records its first failure in `failures`, and marks it as failed."""
        try:
            getattr(writer, method)(*arguments)
        except (Exception, SystemExit) as cause:
            if id(writer) not in self._failed:
                source = f"writer {type(writer).__name__}.{method}{at_step(arguments)}"
                error = CallbackError(f"{source}: {failure(cause)}")
                error.__cause__ = cause
                self._failures.append(error)
            self._failed.add(id(writer))


@contextlib.contextmanager
def failures_of_writers() -> Iterator[list[CallbackError]]:
    """Context that yields an empty list, for the failures of `UserWriters`.

    If the block raises, each failure in the list becomes a `LoggerWarning`. Otherwise the caller has to handle them.
    """
    failures: list[CallbackError] = []
    try:
        yield failures
    except BaseException:
        for error in failures:
            warnings.warn(str(error), LoggerWarning, stacklevel=2)
        raise
