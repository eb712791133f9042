"""Change what calling a module does, without editing it: its class is exchanged for a subclass with another call."""

import functools
from collections.abc import Callable


def has_call(cls: type) -> bool:
    """Whether instances of `cls` can be called."""
    # Not hasattr: every class object is itself callable.
    return any("__call__" in vars(base) for base in cls.__mro__)


def with_call(cls: type, around: Callable, **members) -> type:
    """A subclass of `cls`, under its name, whose call is `around(call, self, *args, **kwargs)`.

    NNX keeps a module's class through split and merge, and `isinstance` still holds. A caller that wants equal models
    to have equal graph definitions caches the result.

    Args:
      cls: a class whose instances can be called.
      around: gets the call of `cls`, the module, and the arguments.
      **members: further attributes of the subclass.
    """
    call = cls.__call__

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        return around(call, self, *args, **kwargs)

    subclass = type(cls)(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__, **members})
    subclass.__qualname__ = cls.__qualname__
    return subclass
