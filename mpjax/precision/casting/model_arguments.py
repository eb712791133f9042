"""Modules as arguments of a traced function: Flax NNX objects are updated afterwards, Equinox modules named by path.

An Equinox module is a pytree. The traced function may take it apart and rebuild it, as with `eqx.partition` and
`eqx.combine`. Its arrays stay the same objects, so they identify the module; Equinox itself names a scope only by the
class of a layer.
"""

import contextlib
import contextvars
import functools
import os.path
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax.precision.calls import modules_of, name_scopes, owner_of_call
from mpjax.precision.dtypes import path_name


class ModelArguments(NamedTuple):
    """The arguments of a call, separated into the state of the NNX objects among them and the rest.

    NNX objects are modules, random streams and optimizers. A traced function can then take their state as arrays.

    Attributes:
      tree: `(state, rest)`: the state of all objects, and the arguments with None in place of the objects.
      join: a function `tree -> (arguments, changed)`, for a tree like `tree` with other arrays. It builds the arguments
        with new objects. `changed()` returns the part of the objects' state that has changed since.
      write_back: a function that writes this changed part to the original objects, in place. It also sets the other
        attributes (counters, flags) that the new objects had changed when `changed()` was called.
      originals: the objects, by their key path among the arguments.
    """

    tree: tuple[Any, Any]
    join: Callable[[tuple[Any, Any]], tuple[Any, Callable[[], Any]]]
    write_back: Callable[[Any], None]
    originals: dict[tuple, Any]

    @property
    def modules(self) -> dict[tuple, Any]:
        """The objects that are modules, by key path."""
        if not self.originals:
            return {}
        from flax import nnx

        return {path: node for path, node in self.originals.items() if isinstance(node, nnx.Module)}

    def paths(self) -> set[str]:
        """Collects the paths of all submodules, each inside its own module among the arguments; "" for these."""
        return {path for module in self.modules.values() for path in modules_of(module)}


def take_models_apart(arguments, *, name: bool = True) -> ModelArguments:
    """Separates NNX objects from the other arguments; if Flax was not imported, there are none. Changes nothing.

    Args:
      arguments: any pytree.
      name: whether the submodules of the new objects that `join` makes run under the named scopes of their paths.
    """
    if "flax" not in sys.modules:
        return _no_models(arguments)
    from flax import nnx

    leaves, treedef = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=lambda n: isinstance(n, nnx.Pytree))
    originals = {path: leaf for path, leaf in leaves if isinstance(leaf, nnx.Pytree)}
    if not originals:
        return _no_models(arguments)
    # One split for all objects, so that variables shared between them stay shared.
    graph, state = nnx.split(tuple(originals.values()))
    attributes: list[tuple[tuple, str, Any]] = []
    others = [None if path in originals else leaf for path, leaf in leaves]

    def join(tree):
        state, rest = tree
        before = {path: _value(leaf) for path, leaf in nnx.to_flat_state(state)}
        objects = nnx.merge(graph, state)
        for node in objects:
            if name and isinstance(node, nnx.Module):
                name_scopes(node)
        turn = iter(objects)
        filled = zip((path for path, _ in leaves), treedef.flatten_up_to(rest), strict=True)
        joined = jax.tree.unflatten(treedef, [next(turn) if path in originals else x for path, x in filled])
        plain = _plain_attributes(objects)

        def changed():
            attributes[:] = _set_since(plain, _plain_attributes(objects))
            after = nnx.to_flat_state(nnx.state(objects))
            return nnx.from_flat_state([(p, leaf) for p, leaf in after if _value(leaf) is not before.get(p)])

        return joined, changed

    def write_back(changed) -> None:
        nnx.update(tuple(originals.values()), changed)
        nodes = dict(_nodes(tuple(originals.values())))
        for path, name, value in attributes:
            setattr(nodes[path], name, value)

    return ModelArguments((state, jax.tree.unflatten(treedef, others)), join, write_back, originals)


def _nodes(objects) -> Iterator[tuple[tuple, Any]]:
    from flax import nnx

    return ((path, node) for path, node in nnx.iter_graph(objects) if isinstance(node, nnx.Pytree))


def _plain_attributes(objects) -> dict[tuple, dict[str, Any]]:
    """Collects the attributes that hold no arrays (counters, flags, names), by object path and then by name."""
    return {
        path: {
            name: value
            for name, value in vars(node).items()
            if not name.startswith("_pytree__") and not any(map(_is_state, jax.tree.leaves(value, is_leaf=_is_state)))
        }
        for path, node in _nodes(objects)
    }


def _is_state(leaf) -> bool:
    from flax import nnx

    return isinstance(leaf, nnx.Pytree | nnx.Variable | jax.Array | np.ndarray)


def _set_since(before: dict[tuple, dict], after: dict[tuple, dict]) -> list[tuple[tuple, str, Any]]:
    """Lists the attributes that are new or another object than before, as `(object path, attribute name, value)`."""
    missing = object()
    return [
        (path, name, value)
        for path, attributes in before.items()
        for name, value in after.get(path, {}).items()
        if value is not attributes.get(name, missing)
    ]


def _value(leaf):
    """The array of a variable, or the leaf itself if a module holds a bare array."""
    return leaf.get_value() if hasattr(leaf, "get_value") else leaf


def _no_models(arguments) -> ModelArguments:
    return ModelArguments(
        tree=(None, arguments),
        join=lambda tree: (tree[1], lambda: None),
        write_back=lambda changed: None,
        originals={},
    )


_PATHS: contextvars.ContextVar[Mapping[int, str]] = contextvars.ContextVar("paths", default={})  # noqa: B039
"""The path of each array in its module, by `id`, while a function of the module is traced."""

_HERE: contextvars.ContextVar[str] = contextvars.ContextVar("here", default="")
"""The path of the module that is being called."""

_NAMED = "_mpjax_named"


@contextlib.contextmanager
def equinox_scopes(tree) -> Iterator[None]:
    """Context: inside the `with` block, Equinox modules of a tree run under a `jax.named_scope` of their path.

    The path is the path inside the outermost module (`layers/0`). The `__call__` of their classes is replaced for the
    whole process; outside the block it adds no scope. Does nothing if Equinox was not imported.
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
    """Replaces the `__call__` of `cls` or of the base that defines it, once, to open scopes for known modules.

    A module is known if one of its arrays has a path in the present `equinox_scopes` block.
    """
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
    """Finds the path of an Equinox module as the common folder of the paths of its arrays; None if none is known."""
    known = _PATHS.get()
    paths = [known[id(leaf)] for leaf in jax.tree.leaves(module) if id(leaf) in known] if known else []
    return os.path.commonpath([f"/{os.path.dirname(path)}" for path in paths])[1:] if paths else None


def _classes_in(module) -> Iterator[type]:
    yield type(module)
    for inner in _modules_in(vars(module)):
        yield from _classes_in(inner)


def _modules_in(tree) -> list:
    """Collects the Equinox modules of a tree, without modules inside other modules."""
    import equinox

    def is_module(node) -> bool:
        return isinstance(node, equinox.Module)

    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_module) if is_module(leaf)]
