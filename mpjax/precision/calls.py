"""What calls of a module go through besides its own code: wrappers, as values that the module holds.

A module keeps its class. The class that defines its `__call__` is given, once, a call that looks for wrappers on the
module and is as before for a module without. So no class is made: none of a user's class-level code runs, nothing new
is in a registry or in `__subclasses__()`, and what could be pickled, copied, split and merged still can.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol


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
