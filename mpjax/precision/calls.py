"""What calls of a module pass through besides its own code: wrappers, as values on the module, and named scopes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax


if TYPE_CHECKING:
    from flax import nnx


class Wrapper(Protocol):
    """What happens around a module's call. A value: equal wrappers make graph definitions of modules equal.

    Attributes:
      depth: where it stands among the wrappers of a module, the outermost first.
    """

    depth: ClassVar[int]

    def __call__(self, call: Callable, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `call(module, *args, **kwargs)` and gives what the wrapped call gives."""
        ...


@dataclasses.dataclass(frozen=True)
class _Wrappers:
    """The wrappers of one module, outermost first, and the class whose `__call__` they are around."""

    owner: type
    chain: tuple[Wrapper, ...]

    def __reduce__(self):
        return _around, (self.owner, self.chain)


_NAME = "_mpjax_wrappers"


def has_call(cls: type) -> bool:
    """Whether instances of `cls` can be called."""
    # Not hasattr: every class object is itself callable.
    return owner_of_call(cls) is not None


def wrapper_of(module: Any, kind: type) -> Any:
    """The wrapper of that kind which `module` has, or None."""
    return next((wrapper for wrapper in _chain(module) if type(wrapper) is kind), None)


def wrap(module: Any, wrapper: Wrapper) -> None:
    """Puts `wrapper` around the calls of `module`, in place of one of its kind; does nothing if it has no call."""
    owner = owner_of_call(type(module))
    if owner is not None:
        others = [one for one in _chain(module) if type(one) is not type(wrapper)]
        chain = tuple(sorted([*others, wrapper], key=lambda one: one.depth))
        setattr(module, _NAME, _around(owner, chain))


def unwrap(module: Any, kind: type) -> None:
    """Takes the wrapper of that kind off `module`, if it has one."""
    if wrapper_of(module, kind) is None:
        return
    chain = tuple(one for one in _chain(module) if type(one) is not kind)
    if chain:
        setattr(module, _NAME, dataclasses.replace(vars(module)[_NAME], chain=chain))
    else:
        delattr(module, _NAME)


def _chain(module) -> tuple[Wrapper, ...]:
    wrappers = vars(module).get(_NAME)
    return wrappers.chain if wrappers else ()


def owner_of_call(cls: type) -> type | None:
    """Returns the class from which `cls` has its `__call__`, or None if its instances cannot be called."""
    return next((base for base in cls.__mro__ if "__call__" in vars(base)), None)


def _around(owner: type, chain: tuple[Wrapper, ...]) -> _Wrappers:
    """Also what unpickling calls, so that the class looks for wrappers in a new process too."""
    if not hasattr(vars(owner)["__call__"], _NAME):
        owner.__call__ = _looking_for_wrappers(owner)
    return _Wrappers(owner, chain)


def _looking_for_wrappers(owner: type) -> Callable:
    call: Any = owner.__call__

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        wrappers = vars(self).get(_NAME)
        # A subclass with a call of its own may come here by super(): its wrappers are around its own call.
        if wrappers is None or wrappers.owner is not owner:
            return call(self, *args, **kwargs)
        wrapped = call
        for wrapper in reversed(wrappers.chain):
            wrapped = functools.partial(wrapper, wrapped)
        return wrapped(self, *args, **kwargs)

    setattr(__call__, _NAME, True)
    return __call__


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
