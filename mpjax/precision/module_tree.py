"""Names the modules of a Flax NNX model: the classes and parents that rules match, second names, and variables."""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mpjax.precision.rules import Lineage


if TYPE_CHECKING:
    import jax
    from flax import nnx


def lineages_of(modules: dict, tags: Mapping[str, frozenset[str]] = MappingProxyType({})) -> list[Lineage]:
    """Lists the lineage of each module, sorted by path: the modules that contain it, root first, and the module itself.

    For each of them, the lineage has the path, and the names of its class, its base classes and its tags.

    Args:
      modules: the modules by path.
      tags: further names by path, which rules match like the class names of a module.
    """
    return [_lineage(path, modules, tags) for path in sorted(modules)]


def second_names(modules: dict) -> dict[str, str]:
    """Finds the further paths of modules that several attributes share; maps each to the module's path in `modules`.

    `modules` has each module once, by its first path. Lists and dicts of modules are searched too.
    """
    from flax import nnx

    first = {id(module): path for path, module in modules.items()}
    names = {}
    for path, module in modules.items():
        for name, held in attributes(module):
            other = f"{path}/{name}" if path else name
            if isinstance(held, nnx.Module) and first.get(id(held), other) != other:
                names[other] = first[id(held)]
    return names


def declared(module: "nnx.Module") -> list[str]:
    """Lists the names of a module's attributes, in the order in which they were first set.

    The order of `vars` would not do: it is sorted by name after `nnx.merge`, `nnx.eval_shape` or `nnx.jit`.
    """
    return list(vars(module).get("_pytree__nodes", ()))


def attributes(module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a module as `(name, value)`.

    After a list, tuple or dict, also yields each of its items, as `(name/index, item)` or `(name/key, item)`. Lists
    inside these are not opened.
    """
    for name, held in vars(module).items():
        yield name, held
        items = held.items() if isinstance(held, Mapping) else enumerate(held) if isinstance(held, Sequence) else ()
        yield from ((f"{name}/{key}", value) for key, value in items)


def variables_by_module(model, modules: dict) -> "dict[str, list[nnx.Variable]]":
    """Groups the variables of a model by the path of the innermost module of `modules` that holds them.

    A variable in a list or a dict belongs to the module that has the list. A shared variable is listed once. Every path
    of `modules` is in the result, also with an empty list.
    """
    from flax import nnx

    variables = {path: [] for path in modules}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            owners = ("/".join(map(str, path[:depth])) for depth in reversed(range(len(path))))
            variables[next(owner for owner in owners if owner in modules)].append(node)
    return variables


def plain_arrays(model: "nnx.Module") -> "list[tuple[str, nnx.Module, jax.Array]]":
    """Lists the attributes that hold a JAX array outside an `nnx.Variable`, such as `self.offsets = jnp.arange(8)`.

    Returns:
      For each, the path of the attribute, the module that has it, and the array.
    """
    import jax
    from flax import nnx

    return [
        ("/".join(map(str, (*path, name))), module, value)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, jax.Array)
    ]


def _lineage(path: str, modules: dict, tags: Mapping[str, frozenset[str]]) -> Lineage:
    parts = path.split("/") if path else []
    ancestors = ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return tuple(
        (name, frozenset(class_names(modules[name])) | tags.get(name, frozenset()))
        for name in ancestors
        if name in modules
    )


def class_names(module: "nnx.Module") -> Iterator[str]:
    """Yields the names of a module's class and of the NNX classes that it inherits from, without `Module` itself."""
    from flax import nnx

    for cls in type(module).__mro__:
        if issubclass(cls, nnx.Module) and cls is not nnx.Module:
            yield cls.__name__


_NUMBERED = re.compile(r"(.*\D)(\d+)")


def with_lists(paths: Iterable[str]) -> dict[str, str]:
    """Maps each path to one in which numbered attributes are written like list items: `layer2/up` to `layer(s)/2/up`.

    Attributes count as a list if at least two in the same module have the same name before the number, and their
    numbers have no gap: `layer1`, `layer2`, `layer3`. Other names stay unchanged.
    """
    names = {tuple(parts[: depth + 1]) for path in paths for parts in [path.split("/")] for depth in range(len(parts))}
    numbers: dict[tuple[tuple[str, ...], str], set[int]] = collections.defaultdict(set)
    for name in names:
        if numbered := _NUMBERED.fullmatch(name[-1]):
            numbers[name[:-1], numbered[1]].add(int(numbered[2]))
    lists = {key for key, indices in numbers.items() if 1 < len(indices) == max(indices) - min(indices) + 1}

    def listed(parts: tuple[str, ...]) -> Iterator[str]:
        for depth, component in enumerate(parts):
            numbered = _NUMBERED.fullmatch(component)
            is_item = numbered and (parts[:depth], numbered[1]) in lists
            yield f"{numbered[1]}(s)/{int(numbered[2])}" if numbered and is_item else component

    return {path: "/".join(listed(tuple(path.split("/")))) for path in paths}


def is_item(name: str) -> bool:
    """True if a name in a module path is a list index (digits only), or `all`, the name of blocks stacked in one."""
    return name.isdecimal() or name == "all"
