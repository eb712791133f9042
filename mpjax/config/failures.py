"""Errors of the user's code in one line: the failed call, the error, and its file and line."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from mpjax.errors import UsageError, failure


@contextlib.contextmanager
def named_failure(what: str, code: Any) -> Iterator[None]:
    """Turns any exception of the user's code into a UsageError with the failed call and its place; a UsageError stays.

    Args:
      what: the beginning of the message, such as `--training.objective FILE.py:NAME`.
      code: the function, class or object that the body calls.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {failure(error, file_of(code))}") from error


def file_of(code: Any) -> str:
    """The file of a function, of a class, or of the class of an object; empty if Python does not know it."""
    while isinstance(code, functools.partial):
        code = code.func
    for one in (code, type(code)):
        try:
            return inspect.getsourcefile(inspect.unwrap(one)) or ""
        except (TypeError, ValueError):
            continue
    return ""
