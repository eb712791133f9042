"""Wrappers around a module's `__call__`, stored as values on the module, and named scopes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax


if TYPE_CHECKING:
    from flax import nnx


class Wrapper(Protocol):
    """Code that runs around a module's call, stored on the module as a value that can be compared.

    Modules with equal wrappers have equal NNX graph definitions, so that `jax.jit` does not compile again.

    Attributes:
      depth: the position among the wrappers of a module; the smallest is outermost.
    """

    depth: ClassVar[int]

    def __call__(self, call: Callable, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `call(module, *args, **kwargs)`, with the wrapper's own work before and after; returns the result."""
        ...


@dataclasses.dataclass(frozen=True)
class _Wrappers:
    """The wrappers of one module, outermost first, and the class whose `__call__` they wrap."""

    owner: type
    chain: tuple[Wrapper, ...]

    def __reduce__(self):
        return _around, (self.owner, self.chain)


_NAME = "_mpjax_wrappers"


def has_call(cls: type) -> bool:
    """True if instances of `cls` can be called: it or a base class defines `__call__`."""
    # Not hasattr: it is True for every class, because a class itself is callable.
    return owner_of_call(cls) is not None


def wrapper_of(module: Any, kind: type) -> Any:
    """Finds the wrapper of exactly the type `kind` on `module`; None if there is none."""
    return next((wrapper for wrapper in wrappers_of(module) if type(wrapper) is kind), None)


def wrap(module: Any, wrapper: Wrapper) -> None:
    """Wraps the calls of `module` in `wrapper`, in place; it replaces a wrapper of the same type.

    The first wrapper on a module of a class also replaces the `__call__` of the class, for the whole process, by one
    that looks for wrappers on each instance. Does nothing if instances of the module's class cannot be called.
    """
    owner = owner_of_call(type(module))
    if owner is not None:
        others = [other for other in wrappers_of(module) if type(other) is not type(wrapper)]
        chain = tuple(sorted([*others, wrapper], key=lambda link: link.depth))
        setattr(module, _NAME, _around(owner, chain))


def unwrap(module: Any, kind: type) -> None:
    """Removes the wrapper of type `kind` from `module`, if there is one."""
    if wrapper_of(module, kind) is None:
        return
    chain = tuple(wrapper for wrapper in wrappers_of(module) if type(wrapper) is not kind)
    if chain:
        setattr(module, _NAME, dataclasses.replace(vars(module)[_NAME], chain=chain))
    else:
        delattr(module, _NAME)


def wrappers_of(module: Any) -> tuple[Wrapper, ...]:
    """The wrappers on `module`, outermost first."""
    wrappers = vars(module).get(_NAME)
    return wrappers.chain if wrappers else ()


def owner_of_call(cls: type) -> type | None:
    """Finds the class, `cls` or a base, that defines its `__call__`; None if its instances cannot be called."""
    return next((base for base in cls.__mro__ if "__call__" in vars(base)), None)


def _around(owner: type, chain: tuple[Wrapper, ...]) -> _Wrappers:
    """Builds the wrappers, and replaces `owner.__call__`, once in a process, by one that looks for wrappers.

    Unpickling calls this too, so that the class also looks for wrappers in a new process.
    """
    if not hasattr(vars(owner)["__call__"], _NAME):
        owner.__call__ = _looking_for_wrappers(owner)
    return _Wrappers(owner, chain)


def _looking_for_wrappers(owner: type) -> Callable:
    call: Any = owner.__call__

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        wrappers = vars(self).get(_NAME)
        # A subclass with its own `__call__` may call this by super(); its wrappers belong to its own call.
        if wrappers is None or wrappers.owner is not owner:
            return call(self, *args, **kwargs)
        wrapped = call
        for wrapper in reversed(wrappers.chain):
            wrapped = functools.partial(wrapper, wrapped)
        return wrapped(self, *args, **kwargs)

    setattr(__call__, _NAME, True)
    return __call__


def modules_of(model: "nnx.Module") -> "dict[str, nnx.Module]":
    """Maps module paths, attribute names and indices joined by `/`, to `model` itself ("") and all its submodules.

    A module that several attributes share is listed once, by its first path.
    """
    from flax import nnx

    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


def name_scopes(model: "nnx.Module") -> None:
    """Makes every callable submodule run under a `jax.named_scope` of its path (`blocks/3/conv1`), in place.

    Scopes nest like the calls and cost nothing at run time. The model itself opens no scope. A second call changes
    nothing.
    """
    from flax import nnx

    modules = {path: module for path, module in nnx.iter_modules(model) if has_call(type(module))}
    for path, module in modules.items():
        parents = [path[:depth] for depth in range(len(path)) if path[:depth] in modules]
        name = "/".join(map(str, path[len(parents[-1]) if parents else 0 :]))
        if name and wrapper_of(module, Scope) != Scope(name):
            wrap(module, Scope(name))


def scope_of(module: Any) -> contextlib.AbstractContextManager:
    """Context that opens the named scope of `module` in a `with` block, for operations outside its `__call__`.

    The scope is the one that `name_scopes` gave to the module; without one, the block opens no scope.
    """
    scope = wrapper_of(module, Scope)
    return contextlib.nullcontext() if scope is None else jax.named_scope(scope.name)


@dataclasses.dataclass(frozen=True)
class Scope:
    """A wrapper that runs the calls of a module under a `jax.named_scope`.

    Attributes:
      name: the name of the scope: the module's path, relative to the nearest callable module that contains it.
    """

    name: str
    depth: ClassVar[int] = 1

    def __call__(self, call, module, *args, **kwargs):
        """Calls a module under the scope."""
        with jax.named_scope(self.name):
            return call(module, *args, **kwargs)
