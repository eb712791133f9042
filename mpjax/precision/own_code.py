"""Sums in the code of a user's own modules, which no layer's dtype reaches: gathers, windows, broadcasts, loops."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.precision.calls import owner_of_call, unwrap, wrap
from mpjax.precision.casting.own_sums import with_sums_in_float32


@dataclasses.dataclass(frozen=True)
class OwnSumsInFloat32:
    """A wrapper for a model: sums of many terms in its own code, and in the derivative of that, are in float32."""

    depth: ClassVar[int] = 0

    def __call__(self, call, module, *args, **kwargs):
        """Calls a model."""
        return with_sums_in_float32(call)(module, *args, **kwargs)


def add_in_float32(modules: Mapping[str, Any], *, half: bool) -> None:
    """Makes a model with code of its own add in float32 if it computes in `half` precision; otherwise as it is.

    Args:
      modules: the modules of the model by path.
      half: True if a module computes in half precision.
    """
    if half and any(map(_has_own_code, modules.values())):
        wrap(modules[""], OwnSumsInFloat32())
    else:
        unwrap(modules[""], OwnSumsInFloat32)


def _has_own_code(module: Any) -> bool:
    owner = owner_of_call(type(module))
    return owner is not None and owner.__module__.partition(".")[0] not in ("flax", "mpjax")
