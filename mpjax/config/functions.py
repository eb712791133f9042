"""A user's own function or class, named in a setting."""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType

from mpjax.config.paths import expanded
from mpjax.errors import UsageError


def load_function(spec: str, *, flag: str) -> Callable:
    """The function or class that `FILE.py:NAME` or `package.module:NAME` names.

    Args:
      spec: where it is.
      flag: the setting, for messages.

    Raises:
      UsageError: no such file, module or function, or the file is no Python; the message says what is there.
    """
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name):
        raise UsageError(f"{flag} {spec}: wanted FILE.py:NAME or package.module:NAME")
    module = _module(where, flag, spec)
    found = getattr(module, name, None)
    if not callable(found):
        there = [n for n, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)]
        near = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"{flag} {spec}: {where} has no {name}; {hint}it has {', '.join(there) or 'none'}")
    return found


def _module(where: str, flag: str, spec: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = expanded(where)
        if not path.exists():
            raise UsageError(f"{flag} {spec}: no file {path}")
        loading = importlib.util.spec_from_file_location(path.stem, path)
        assert loading is not None  # only where the ending is not one of Python's
        assert loading.loader is not None
        module = importlib.util.module_from_spec(loading)
        loading.loader.exec_module(module)
    except ImportError as error:
        raise UsageError(f"{flag} {spec}: cannot import {where}: {error}") from error
    except SyntaxError as error:
        # Its own name and line: the mistake may be in a file that this one imports.
        place = f"{error.filename or where}, line {error.lineno}"
        line = f": {error.text.strip()}" if error.text else ""
        raise UsageError(f"{flag} {spec}: {place}: {type(error).__name__}: {error.msg}{line}") from error
    return module
