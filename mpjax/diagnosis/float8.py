"""Emulates the saturation and the scales of a program with products in float8."""

from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.formats import range_of
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.sites import site_of
from mpjax.precision.float8.scaling import SATURATE


_INFINITE = np.uint32(0x7F800000)


class SaturationRunner(Protocol):
    """The methods of `Emulator` that saturation uses."""

    @property
    def top(self) -> bool:
        """True if values beyond the largest number of their dtype overflow, or saturate in float8."""
        ...

    @property
    def recorder(self) -> Any:
        """The recorder of the readings; None if no readings are taken."""
        ...

    def rounds_in(self, place: Place, eqn: Any, pairs: list[Pair]) -> bool:
        """True if the results of an equation are rounded."""
        ...

    def taken(self, pair: Pair, aval: Any, path: str, rounds: bool) -> Any:
        """The value of an operand as an equation in module `path` gets it: in float32, rounded to half precision."""
        ...


def saturated(runner: SaturationRunner, eqn: Any, pair: Pair, place: Place) -> Pair:
    """Emulates the call that clips a value to the range of a float8 dtype, and records clipped values as overflow.

    Inf and NaN pass unchanged. So does the reference's value, and any value if the module does not round.

    Args:
      runner: the emulator.
      eqn: the call; its name ends in the name of the dtype.
      pair: the value.
      place: the module and direction of the call.
    """
    dtype = np.dtype(eqn.params["name"].removeprefix(SATURATE))
    limit, rounds = np.float32(range_of(dtype).largest), runner.rounds_in(place, eqn, [pair])
    value = runner.taken(pair, eqn.invars[0].aval, place.path, rounds)
    beyond = jnp.isfinite(value) & (jnp.abs(value) > limit) & (rounds and runner.top)
    marks = pair.marks
    if runner.recorder is not None:
        site = site_of(eqn, eqn.outvars[0], place)._replace(operation="saturation", dtype=dtype)
        shown = jnp.where(beyond, jnp.float32(jnp.inf), value)
        marks = runner.recorder.observe(site, pair.wide, value, shown, [marks])
    limited = jnp.where(beyond, jnp.copysign(limit, value), value)
    return pair._replace(low=limited, path=place.path, marks=marks)


def with_own_scales(eqn: Any, wide: list, low: list) -> list:
    """Replaces the reference's float32 bits read as integers, `wide`, by the program's own, `low`.

    The scales of float8 are computed by such operations on bits. Results are divided by the scales, so the scales do
    not matter without rounding, but values with different scales cannot be compared.

    For an equation that does not read float32 bits as uint32, returns `wide` unchanged. Elements keep `wide` where
    `low` is not positive and finite.
    """
    if eqn.primitive.name != "bitcast_convert_type" or low[0].dtype != np.uint32:
        return wide
    usable = (low[0] > 0) & (low[0] < _INFINITE)  # except where the program's own maximum overflowed
    return [jnp.where(usable, low[0], wide[0])]
