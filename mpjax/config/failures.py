"""Errors of the user's code as one line: what failed, how, and in which line of which file."""

import contextlib
import functools
import inspect
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any

from mpjax.errors import UsageError, first_line


@contextlib.contextmanager
def named_failure(what: str, code: Any) -> Iterator[None]:
    """Turns any exception of the user's code into a UsageError that says what failed and where; a UsageError stays.

    Args:
      what: the beginning of the message, such as `--training.objective FILE.py:NAME`.
      code: the function, class or object that is called inside.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {failure(error, code)}") from error


def failure(error: Exception, code: Any) -> str:
    """Returns the class and message of an error, with the last line of the user's file that its traceback names.

    If the traceback names none, it is the line that raised the error.
    """
    said = first_line(error) if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    own = [frame for frame in frames if frame.filename == _file_of(code)] or frames
    return f"{said} ({pathlib.Path(own[-1].filename).name}, line {own[-1].lineno})" if own else said


def _file_of(code: Any) -> str:
    """Returns the file of a function, of a class, or of the class of an object; empty if Python does not know it."""
    while isinstance(code, functools.partial):
        code = code.func
    for one in (code, type(code)):
        try:
            return inspect.getsourcefile(inspect.unwrap(one)) or ""
        except (TypeError, ValueError):
            continue
    return ""


def require_call(function: Any, arguments: tuple[str, ...], what: str) -> None:
    """Raises UsageError unless a function can be called with so many arguments; they are named in the message.

    A function whose signature Python does not know may be called with any.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{what}{signature} cannot be called with ({', '.join(arguments)}): {error}; wanted a function of "
            f"({', '.join(arguments)})"
        ) from None
