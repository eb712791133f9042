"""Named scopes by module path, so that an operation in a program can be traced back to its module."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax

from mpjax.precision.calls import has_call, wrap, wrapper_of


if TYPE_CHECKING:
    from flax import nnx


def modules_of(model: "nnx.Module") -> "dict[str, nnx.Module]":
    """The submodules of `model` and itself, by module path: attribute names and indices joined by `/`."""
    from flax import nnx

    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


def name_scopes(model: "nnx.Module") -> None:
    """Makes every submodule of `model` run under `jax.named_scope` of its path (`blocks/3/conv1`), in place.

    The scopes nest as the calls do; they cost nothing at run time. A second call changes nothing.
    """
    from flax import nnx

    modules = {path: module for path, module in nnx.iter_modules(model) if has_call(type(module))}
    for path, module in modules.items():
        parents = [path[:depth] for depth in range(len(path)) if path[:depth] in modules]
        name = "/".join(map(str, path[len(parents[-1]) if parents else 0 :]))
        if name and wrapper_of(module, Scope) != Scope(name):
            wrap(module, Scope(name))


@dataclasses.dataclass(frozen=True)
class Scope:
    """A wrapper that puts calls under a named scope."""

    name: str
    depth: ClassVar[int] = 1

    def __call__(self, call, module, *args, **kwargs):
        """Calls a module under the scope."""
        with jax.named_scope(self.name):
            return call(module, *args, **kwargs)
