"""What a folder offers: the names in its stub `__init__.pyi`, each imported when it is first asked for.

The stub is the one list, which type checkers read too: `from mpjax.training.layout import Layout as Layout`. The files
of the package import from files and read no stub; what a folder offers is for tests, scripts and a user's code.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any


def offer(folder: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Creates `__getattr__` and `__dir__` of a folder, such as `mpjax.training`.

    A name is looked up in its file each time, so whatever a test puts in its place there is seen here as well.
    `__all__` has the names in the order of the stub. A file or folder inside is an attribute too. Any other name is an
    `AttributeError` that suggests the nearest.
    """

    def get(name: str) -> Any:
        if name == "__all__":
            return list(offered(folder))
        if name.startswith("__"):  # asked for by Python and by libraries, which expect to miss it
            raise AttributeError(f"module '{folder}' has no attribute '{name}'")
        if _is_inside(folder, name):
            return importlib.import_module(f"{folder}.{name}")
        home = offered(folder).get(name)
        if home is None:
            raise AttributeError(f"module '{folder}' has no attribute '{name}'{_hint(folder, name)}")
        return getattr(importlib.import_module(home), name)

    return get, lambda: list(offered(folder))


@functools.cache
def offered(folder: str) -> dict[str, str]:
    """The names that a folder offers, in the order of its stub, and the module of each."""
    return {name: module for name, module in _stub(folder).items() if module != folder}


@functools.cache
def _stub(folder: str) -> dict[str, str]:
    """The imports of a stub. What it imports from the folder itself is a folder or file inside."""
    import ast  # local, like the next: a plain run reads no stub
    import importlib.resources

    stub = importlib.resources.files(folder).joinpath("__init__.pyi").read_text(encoding="utf-8")
    imports = (node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@functools.cache
def _is_inside(folder: str, name: str) -> bool:
    """True for a file or folder of the package, which no offered name equals."""
    from importlib.util import find_spec

    return find_spec(f"{folder}.{name}") is not None


def _hint(folder: str, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, _stub(folder), n=1)
    return f". Did you mean: '{near[0]}'?" if near else ""
