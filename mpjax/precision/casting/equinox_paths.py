"""Named scopes by path for Equinox modules. Equinox itself names a scope only by the class of a layer.

An Equinox module is a pytree. The traced function may take it apart and rebuild it, as with `eqx.partition` and
`eqx.combine`. Its arrays stay the same objects, so they identify the module.
"""

import contextlib
import contextvars
import functools
import os.path
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from mpjax.precision.calls import owner_of_call
from mpjax.precision.dtypes import path_name


_PATHS: contextvars.ContextVar[Mapping[int, str]] = contextvars.ContextVar("paths", default={})  # noqa: B039
"""The path of each array in its module, by `id`, while a function of the module is traced."""

_HERE: contextvars.ContextVar[str] = contextvars.ContextVar("here", default="")
"""The path of the module that is being called."""

_NAMED = "_mpjax_named"


@contextlib.contextmanager
def equinox_scopes(tree) -> Iterator[None]:
    """Context: inside the `with` block, Equinox modules of a tree run under a `jax.named_scope` of their path.

    The path is the path inside the outermost module (`layers/0`). It wraps the `__call__` of their classes for good;
    outside the block the wrapper adds no scope.
    """
    if "equinox" not in sys.modules:
        yield
        return
    paths = {}
    for module in _modules_in(tree):
        leaves = jax.tree_util.tree_leaves_with_path(module)
        paths |= {id(leaf): path_name(path) for path, leaf in leaves if isinstance(leaf, jax.Array)}
        for cls in _classes_in(module):
            _look_for_paths(cls)
    token = _PATHS.set(paths)
    try:
        yield
    finally:
        _PATHS.reset(token)


def _look_for_paths(cls: type) -> None:
    """Wraps the `__call__` of `cls` once, where it is defined, to open a scope for modules with a known path."""
    owner: Any = owner_of_call(cls)
    if owner is None or hasattr(owner.__call__, _NAMED):
        return
    call: Callable = owner.__call__

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        path, here = _path_of(self), _HERE.get()
        if path is None:
            return call(self, *args, **kwargs)
        # Equinox's layers open a scope named by class. For a layer that contains modules, the path replaces that scope.
        inside = owner.__module__.startswith("equinox.nn.") and bool(_modules_in(vars(self)))
        with _scope(path.removeprefix(f"{here}/") if path != here else ""):
            token = _HERE.set(path)
            try:
                return (getattr(call, "__wrapped__", call) if inside else call)(self, *args, **kwargs)
            finally:
                _HERE.reset(token)

    setattr(__call__, _NAMED, True)
    owner.__call__ = __call__


def _scope(name: str):
    return jax.named_scope(name) if name else contextlib.nullcontext()


def _path_of(module) -> str | None:
    """The path of a module, found as the common path of its arrays; None if no array has a known path."""
    known = _PATHS.get()
    paths = [known[id(leaf)] for leaf in jax.tree.leaves(module) if id(leaf) in known] if known else []
    return os.path.commonpath([f"/{os.path.dirname(path)}" for path in paths])[1:] if paths else None


def _classes_in(module) -> Iterator[type]:
    yield type(module)
    for inner in _modules_in(vars(module)):
        yield from _classes_in(inner)


def _modules_in(tree) -> list:
    """Collects the outermost Equinox modules of a tree."""
    import equinox

    def is_module(node) -> bool:
        return isinstance(node, equinox.Module)

    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_module) if is_module(leaf)]
