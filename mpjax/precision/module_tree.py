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
    """Lists the lineage of each module, in the order of the paths: its parents, root first, and the module itself.

    Args:
      modules: the modules by path.
      tags: further names by path, which rules match like the class names of a module.
    """
    return [_lineage(path, modules, tags) for path in sorted(modules)]


def second_names(modules: dict) -> dict[str, str]:
    """Finds the further paths of modules that several attributes share; maps each to the module's path in `modules`."""
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
    """The names of a module's attributes, in the order in which they were first set.

    `vars` sorts them after `nnx.merge`, and in modules from `nnx.eval_shape` or `nnx.jit`.
    """
    return list(vars(module).get("_pytree__nodes", ()))


def attributes(module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a module with their names, and the items of attributes that are lists or dicts."""
    for name, held in vars(module).items():
        yield name, held
        items = held.items() if isinstance(held, Mapping) else enumerate(held) if isinstance(held, Sequence) else ()
        yield from ((f"{name}/{key}", value) for key, value in items)


def variables_by_module(model, modules: dict) -> "dict[str, list[nnx.Variable]]":
    """Groups variables by module path; the variables of a container belong to the module that holds it."""
    from flax import nnx

    variables = {path: [] for path in modules}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            owners = ("/".join(map(str, path[:depth])) for depth in reversed(range(len(path))))
            variables[next(owner for owner in owners if owner in modules)].append(node)
    return variables


def plain_arrays(model: "nnx.Module") -> "list[tuple[str, nnx.Module, jax.Array]]":
    """Lists the attributes that are arrays and no variables, such as `self.offsets = jnp.arange(8)`.

    Returns:
      The path of each, the module that has it, and the array.
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
    """Yields the names of a module's class and of the NNX classes that it inherits from."""
    from flax import nnx

    for cls in type(module).__mro__:
        if issubclass(cls, nnx.Module) and cls is not nnx.Module:
            yield cls.__name__


_NUMBERED = re.compile(r"(.*\D)(\d+)")


def with_lists(paths: Iterable[str]) -> dict[str, str]:
    """Maps paths to paths in which consecutively numbered attributes are list items: `layer2/up` to `layer(s)/2/up`."""
    names = {tuple(parts[: depth + 1]) for path in paths for parts in [path.split("/")] for depth in range(len(parts))}
    numbers: dict[tuple[tuple[str, ...], str], set[int]] = collections.defaultdict(set)
    for name in names:
        if numbered := _NUMBERED.fullmatch(name[-1]):
            numbers[name[:-1], numbered[1]].add(int(numbered[2]))
    lists = {key for key, indices in numbers.items() if 1 < len(indices) == max(indices) - min(indices) + 1}

    def place(parts: tuple[str, ...]) -> Iterator[str]:
        for depth, part in enumerate(parts):
            numbered = _NUMBERED.fullmatch(part)
            is_item = numbered and (parts[:depth], numbered[1]) in lists
            yield f"{numbered[1]}(s)/{int(numbered[2])}" if numbered and is_item else part

    return {path: "/".join(place(tuple(path.split("/")))) for path in paths}


def is_item(part: str) -> bool:
    """True for an index of a list, and for `all`, the name of stacked blocks."""
    return part.isdecimal() or part == "all"
