"""Names the modules of a Flax NNX model: the classes and parents that rules match, second names, and variables."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mpjax.precision.rules import Lineage


if TYPE_CHECKING:
    from flax import nnx


def lineages_of(modules: dict, tags: Mapping[str, frozenset[str]] = MappingProxyType({})) -> list[Lineage]:
    """Returns each module with its parents, root first.

    Args:
      modules: the modules by path.
      tags: names by path that stand among those of a module's classes.
    """
    return [_lineage(path, modules, tags) for path in sorted(modules)]


def second_names(modules: dict) -> dict[str, str]:
    """Returns the further paths of shared modules, each mapped to the first path of its module."""
    from flax import nnx

    first = {id(module): path for path, module in modules.items()}
    names = {}
    for path, module in modules.items():
        for name, held in _attributes(module):
            other = f"{path}/{name}" if path else name
            if isinstance(held, nnx.Module) and first.get(id(held), other) != other:
                names[other] = first[id(held)]
    return names


def _attributes(module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a module, and the items of those that are lists or dicts, with their names."""
    for name, held in vars(module).items():
        yield name, held
        items = held.items() if isinstance(held, Mapping) else enumerate(held) if isinstance(held, Sequence) else ()
        yield from ((f"{name}/{key}", value) for key, value in items)


def variables_by_module(model, modules: dict) -> "dict[str, list[nnx.Variable]]":
    """Returns the variables of each module by module path: its own, and those in containers that it holds."""
    from flax import nnx

    found = {path: [] for path in modules}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            owners = ("/".join(map(str, path[:depth])) for depth in reversed(range(len(path))))
            found[next(owner for owner in owners if owner in modules)].append(node)
    return found


def _lineage(path: str, modules: dict, tags: Mapping[str, frozenset[str]]) -> Lineage:
    """Returns the module at `path` and its parents, root first."""
    parts = path.split("/") if path else []
    ancestors = ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return tuple(
        (name, frozenset(class_names(modules[name])) | tags.get(name, frozenset()))
        for name in ancestors
        if name in modules
    )


def class_names(module: "nnx.Module") -> Iterator[str]:
    """Yields the names of a module's class and of the NNX classes that it inherits from."""
    from flax import nnx

    for cls in type(module).__mro__:
        if issubclass(cls, nnx.Module) and cls is not nnx.Module:
            yield cls.__name__
