"""Named scopes by module path, so that an operation in a program can be traced back to its module."""

import functools
from typing import TYPE_CHECKING

import jax

from mpjax.precision.calls import has_call, with_call


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
        if name and scope_of_class(type(module)) != name:
            module.__class__ = scoped(type(module), name)


@functools.cache
def scoped(cls: type, name: str | None) -> type:
    """`cls` with calls under a named scope, if any; cached, so that equal models have equal graph definitions."""
    if name is None:
        return cls

    def around(call, self, *args, **kwargs):
        with jax.named_scope(name):
            return call(self, *args, **kwargs)

    return with_call(cls, around, _mpjax_scope=name, _mpjax_unscoped=unscoped(cls))


def scope_of_class(cls: type) -> str | None:
    """The scope that calls are under; None if they are under none."""
    return getattr(cls, "_mpjax_scope", None)


def unscoped(cls: type) -> type:
    """The class that scopes were put around; `cls` itself if none were."""
    return getattr(cls, "_mpjax_unscoped", cls)
