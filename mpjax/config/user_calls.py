"""Prepares calls of the user's code: parses its arguments, checks its signature, and formats its errors in one line."""

import ast
import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpjax.errors import UsageError, failure


def read_arguments(flag: str, texts: Mapping[str, str], function: Callable, name: str) -> dict[str, Any]:
    """Parses the values of arguments for `function`, by name.

    Args:
      flag: the setting with the arguments, for messages.
      texts: the value of each argument as a Python literal; text that is no literal, such as a word, is a string.
      function: the function that takes them.
      name: the name of the function, for messages.

    Raises:
      UsageError: the function has no such argument, or its default has another type than the value; a number, for
        example, may be an int or a float. Python may also not know the signature.
    """
    accepted = parameters_of(function, name)
    is_open = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    arguments = {}
    for key, text in texts.items():
        if key not in accepted and not is_open:
            near = difflib.get_close_matches(key, accepted, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{flag} {key}: {name} has no such argument; {hint}it takes {', '.join(accepted)}")
        arguments[key] = _literal(text)
        expected = _wanted(accepted[key].default) if key in accepted else None
        if expected and type(arguments[key]) not in expected[1]:
            raise UsageError(
                f"{flag} {key} is {text!r}: wanted {expected[0]}, as its default {accepted[key].default!r}"
            )
    return arguments


def parameters_of(function: Callable, name: str) -> dict[str, inspect.Parameter]:
    """Collects the parameters of a function that can be passed by name.

    Raises:
      UsageError: `inspect.signature` fails, as for some functions in C.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: wanted a function of Python, with a signature: {error}") from None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: parameter for key, parameter in parameters.items() if parameter.kind in by_name}


def require_call(function: Callable, arguments: Sequence[str], name: str) -> None:
    """Raises UsageError if a function cannot be called with as many positional arguments as `arguments` has names.

    Args:
      function: the function; accepted unchecked if Python does not know its signature.
      arguments: the name of each argument, for the message.
      name: the name of the function, for the message.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        takes = signature.replace(return_annotation=inspect.Signature.empty)
        raise UsageError(f"{name} takes {takes}: it is called with ({', '.join(arguments)})") from error


def arguments_of(method: Callable) -> tuple[str, ...]:
    """The names of a method's parameters, without the first one, `self`."""
    return tuple(inspect.signature(method).parameters)[1:]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # TypeError: {[1]: 2}
        return text


def _wanted(default: Any) -> tuple[str, tuple[type, ...]] | None:
    """The type that the default of an argument prescribes for its value, in words and as types; None for any type."""
    if isinstance(default, bool):
        return "True or False", (bool,)
    if isinstance(default, int | float):
        return "a number", (int, float)
    if isinstance(default, tuple):
        return "a tuple in parentheses", (tuple,)
    return ("a word", (str,)) if isinstance(default, str) else None


@contextlib.contextmanager
def named_failure(what: str, code: Any) -> Iterator[None]:
    """Context that converts an exception of the user's code, called in its `with` block, to a UsageError.

    The message is `what`, the error's class and first line, and the file and line in the user's code. A UsageError
    passes unchanged, as do exceptions that are no `Exception`, such as KeyboardInterrupt.

    Args:
      what: the beginning of the message, such as `--training.objective FILE.py:NAME`.
      code: the function, class or object that the block calls.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {failure(error, file_of(code))}") from error


def file_of(code: Any) -> str:
    """The path of the file that defines a function, a class, or the class of an object; empty if Python knows none.

    Partial and wrapped functions count as the function inside.
    """
    while isinstance(code, functools.partial):
        code = code.func
    for candidate in (code, type(code)):
        try:
            return inspect.getsourcefile(inspect.unwrap(candidate)) or ""
        except (TypeError, ValueError):
            continue
    return ""
