"""Exceptions and warnings of mpjax, with the exit code of each exception."""

import functools
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any


class UsageError(ValueError):
    """The input is wrong; the message says what was given, what is wanted and what to write instead. Exit code 2.

    Attributes:
      repair: the settings to write, such as `{"data.image_size": 224}`, where the message names them; else empty.
    """

    def __init__(self, *message: object, repair: Mapping[str, Any] | None = None):
        super().__init__(*message)
        self.repair = dict(repair or {})


class DtypeError(UsageError, TypeError):
    """Arrays have unexpected dtypes; the message names each by its path."""


class Diverged(RuntimeError):
    """Training diverged: values stay non-finite at the smallest loss scale. Exit code 3."""


class CallbackError(RuntimeError):
    """A user's callback or writer failed, or called `sys.exit`; the message names it, and the checkpoint if one was
    saved. Exit code 1."""


class Interrupted(RuntimeError):
    """A signal ended the run after its checkpoint was saved. Exit code 128 + signal."""

    def __init__(self, message: str, signal_number: int | None):
        super().__init__(message)
        self.signal_number = signal_number or 2

    def __reduce__(self):
        return Interrupted, (str(self), self.signal_number)


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of a program that ends with this error; 1: a system error or a fault of the program."""
    match error:
        case UsageError():
            return 2
        case Diverged():
            return 3
        case Interrupted():
            return 128 + error.signal_number
        case KeyboardInterrupt():
            return 130
    return 1


def failure(error: BaseException, file: str = "") -> str:
    """Returns the class and message of an error of the user's code, with the file and line that raised it.

    It is the last line of `file` that the traceback names, if there is one. The first frame is that of the caller,
    which called the user's code. `SystemExit` is told as the call of `sys.exit`.
    """
    said = first_line(error) if str(error) else type(error).__name__
    if isinstance(error, SystemExit):
        said = f"it called sys.exit({'' if error.code is None else repr(error.code)})"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{said} ({pathlib.Path(own[-1].filename).name}, line {own[-1].lineno})" if own else said


class PrecisionWarning(UserWarning):
    """Precision is worse than it could be; the program goes on."""


class DataWarning(UserWarning):
    """Data are interpreted or left out in a way that the user may not expect."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged or does not match, and another one is used or this one differently; or the metrics of the
    steps before it are lost."""


class LoggerWarning(UserWarning):
    """A logger of experiments failed, and the run goes on without it; or a writer failed in a run that failed too."""


WARNINGS = PrecisionWarning, DataWarning, CheckpointWarning, LoggerWarning
"""The warnings that are for the user of a command, and not for its programmer."""


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """Returns a text with control characters written out: names of files and arrays may hold a terminal's commands.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(text))


def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Prints warnings of mpjax on one line, and other warnings as Python does; for `warnings.showwarning`.

    That JAX cannot read its compiled programs is said once for all of them.
    """
    if issubclass(category, WARNINGS):
        print(f"warning: {printable(message)}", file=sys.stderr)
    elif _CACHE.match(str(message)):
        _say_cache_is_damaged(str(sys.modules["jax"].config.jax_compilation_cache_dir))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


_CACHE = re.compile("Error (reading|writing) persistent compilation cache entry")


@functools.cache
def _say_cache_is_damaged(folder: str) -> None:
    print(
        f"warning: compiled programs in {printable(folder)} are damaged and are compiled again each time; delete that "
        "folder, which is written again",
        file=sys.stderr,
    )


def first_line(error: BaseException) -> str:
    """Returns the class of an error of other code and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"
