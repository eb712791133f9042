"""Exceptions and warnings of mpjax, with the exit code of each exception."""

import contextlib
import errno
import functools
import glob
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any


class UsageError(ValueError):
    """The input is wrong. The message names the value, the expected value and what to write instead. Exit code 2.

    Attributes:
      repair: the settings to write, such as `{"data.image_size": 224}`, if the message names them; else empty. An empty
        tuple as a value means that the setting has to be left out.
    """

    def __init__(self, *message: object, repair: Mapping[str, Any] | None = None):
        super().__init__(*message)
        self.repair = dict(repair or {})


class AbsentData(UsageError):
    """A data set's file or folder does not exist. The message names its absolute path."""


class DtypeError(UsageError, TypeError):
    """Arrays have unexpected dtypes. The message lists them by path."""


class Diverged(RuntimeError):
    """Training diverged. Exit code 3.

    Gradients were not finite in too many consecutive steps, the last at the smallest loss scale; or, without loss
    scaling, a loss or gradient norm is not finite; or the last test loss is not finite. Of a run for several seeds: at
    least one of them diverged.
    """


class CallbackError(RuntimeError):
    """A user's callback or writer failed, or the user's code or a library called `sys.exit`. Exit code 1.

    The message names the failed callback or writer, and the checkpoint if one was saved.
    """


class Interrupted(RuntimeError):
    """A signal ended the run after its checkpoint was saved. Exit code 128 + signal.

    Attributes:
      signal_number: the signal that arrived; 2 (SIGINT) if it is unknown.
    """

    def __init__(self, message: str, signal_number: int | None):
        super().__init__(message)
        self.signal_number = signal_number or 2

    def __reduce__(self):
        return Interrupted, (str(self), self.signal_number)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a program that ends with `error`.

    2 for a UsageError, 3 for Diverged, 128 + signal for Interrupted, 130 for KeyboardInterrupt, and 1 for any other
    error, such as a system error or a bug.
    """
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


def is_exhausted(error: BaseException) -> bool:
    """True if an error means that memory of the host or of a device, or file descriptors ran out.

    A file whose read failed with such an error may be undamaged.
    """
    exhausted = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
    return exhausted or getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def failure(error: BaseException, file: str = "") -> str:
    """Formats an error of the user's code: its class, its message's first line, and the file and line that raised it.

    The line is that of the last frame in `file`, or of the last frame of the traceback if none is in `file`. The first
    frame belongs to the caller and is skipped; without other frames, no line is shown. `SystemExit` is shown as a call
    of `sys.exit`.
    """
    message = first_line(error) if str(error) else type(error).__name__
    if isinstance(error, SystemExit):
        message = f"it called sys.exit({'' if error.code is None else repr(error.code)})"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    stack = [frame for frame in frames if frame.filename == file] or frames
    return f"{message} ({pathlib.Path(stack[-1].filename).name}, line {stack[-1].lineno})" if stack else message


class PrecisionWarning(UserWarning):
    """Precision is worse than it could be. The program continues."""


class DataWarning(UserWarning):
    """Data are interpreted or left out in a way that the user may not expect."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged or may be of another run, an export lacks arrays, or metrics of some steps are lost."""


class LoggerWarning(UserWarning):
    """An experiment logger failed and the run continues without it, or a writer failed in a run that also failed."""


WARNINGS = PrecisionWarning, DataWarning, CheckpointWarning, LoggerWarning
"""The warnings for the user of a command, as opposed to its programmer."""


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and the Unicode characters that reverse the direction of text or end a
line."""


def printable(text: object) -> str:
    """Escapes control characters except tab and newline, because names of files and arrays may hold terminal commands.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], str(text))


def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Prints a warning to stderr, those of mpjax after `warning:`, others as Python does; for `warnings.showwarning`.

    JAX's warnings about its cache of compiled programs become one line per process for each folder and kind of failure.
    If an entry is damaged, the file is deleted, so that JAX compiles and writes it again. Warnings about programs that
    were compiled for a GPU that is not here are dropped: JAX can never read these. `file` is ignored.
    """
    if issubclass(category, WARNINGS):
        print(f"warning: {printable(message)}", file=sys.stderr)
    elif match := _CACHE.match(str(message)):
        doing, module, reason = match.groups()
        folder = str(sys.modules["jax"].config.jax_compilation_cache_dir)
        if "PjRtCompiler must be constructed" in reason:
            return
        if doing == "writing":
            _say_of_cache(folder, "cannot be written; they are compiled again each time")
        elif re.match(r"\w*(OS|Permission|NotFound|Timeout|Memory)Error", reason):
            _say_of_cache(folder, "cannot be read; they are compiled again each time")
        else:
            _remove_programs(pathlib.Path(folder), module)
            _say_of_cache(folder, "are damaged and are compiled again")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


_CACHE = re.compile("Error (reading|writing) persistent compilation cache entry for '?([^':]*)'?(?:: )?(.*)", re.DOTALL)


def _remove_programs(folder: pathlib.Path, module: str) -> None:
    """Deletes the compiled programs named `module` from JAX's cache folder, because JAX never overwrites an entry."""
    for entry in folder.glob(f"{glob.escape(module)}-*-cache"):
        with contextlib.suppress(OSError):
            entry.unlink()


@functools.cache
def _say_of_cache(folder: str, about: str) -> None:
    print(f"warning: compiled programs in {printable(folder)} {about}", file=sys.stderr)


def first_line(error: BaseException) -> str:
    """Formats an error as its class and the first line of its message, without a final period: `ValueError: text`."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, cut after 200 characters; the name of its class if the message is empty."""
    return str(error).strip().partition("\n")[0][:200].rstrip(".") or type(error).__name__
