"""What a folder offers: the names in its stub `__init__.pyi`, each imported when it is first asked for.

The stub is the one list, which type checkers read too: `from mpjax.training.layout import Layout as Layout`. Files of the
package import from files and read no stub; a folder's offer is for all that is outside: a user's code, tests, benchmarks.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def offer(folder: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Creates `__getattr__` and `__dir__` of a folder, named as in `mpjax.training`.

    A name of the stub is what its file has under that name now, so what a test replaces there is replaced here. A file
    or folder inside is an attribute too, and `__all__` is the names of the stub in its order. Any other name is an
    `AttributeError` that suggests the nearest.
    """

    def get(name: str) -> Any:
        if name == "__all__":
            return list(offered(folder))
        if name.startswith("__"):
            raise AttributeError(f"module '{folder}' has no attribute '{name}'", name=name, obj=sys.modules[folder])
        if _is_inside(folder, name):
            return importlib.import_module(f"{folder}.{name}")
        names = offered(folder)
        if name not in names:
            raise AttributeError(f"module '{folder}' has no attribute '{name}'{_hint(folder, name)}")
        return getattr(importlib.import_module(names[name]), name)

    return get, lambda: list(offered(folder))


@functools.cache
def offered(folder: str) -> dict[str, str]:
    """The names that a folder offers, in the order of its stub, and the module of each."""
    return {name: module for module, name in _imports(folder) if module != folder}


@functools.cache
def _imports(folder: str) -> list[tuple[str, str]]:
    return list(_read_imports(folder))


def _read_imports(folder: str) -> Iterator[tuple[str, str]]:
    """The module and the name of each import of a folder's stub; folders and files inside it are imported from itself."""
    import ast  # local, like pkgutil: a plain run reads no stub
    import pkgutil

    stub = pkgutil.get_data(folder, "__init__.pyi")
    for statement in ast.parse(stub or b"").body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            yield from ((statement.module, alias.name) for alias in statement.names)


def _is_inside(folder: str, name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(f"{folder}.{name}") is not None


def _hint(folder: str, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, [other for _, other in _imports(folder)], n=1)
    return f". Did you mean: '{near[0]}'?" if near else ""
