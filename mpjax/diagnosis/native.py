"""Runs a step for a compiler, in its own dtypes, and reads what leaves each module, its products and its casts.

Results that are read are computed in float32 from the same operands and then rounded, so that it is known what rounding
made inf or zero; a product of half-precision operands is exact even in the ten-bit products (TF32) that a GPU computes
float32 ones with.
"""

import dataclasses
from collections.abc import Iterator

import jax
from jax.extend import core

from mpjax.diagnosis.arithmetic import PRODUCTS, SUMS, casts_down, is_half, is_opaque, results_of, widened
from mpjax.diagnosis.emulate import NO_SOURCE, Emulator, Pair, Place, site_of
from mpjax.diagnosis.readings import Site
from mpjax.diagnosis.rounding import narrowed, round_to
from mpjax.precision.casting.jaxprs import as_function, bodies, holds_bodies, scope_of
from mpjax.precision.casting.values import cast_like
from mpjax.precision.dtypes import HALF, is_floating


@dataclasses.dataclass(frozen=True)
class Native(Emulator):
    """Runs operations as they are; those that are read, in float32 and rounded.

    Attributes:
      read: the identities of the equations whose results are read.
    """

    read: frozenset[int] = frozenset()

    def constant(self, var, value, owner: str) -> Pair:
        """An array in the dtype of the variable."""
        value = value.astype(var.aval.dtype) if is_floating(var.aval) else value
        return Pair(value, value)

    def entered(self, var, value, owner: str) -> Pair:
        """An input in the dtype of the variable; its rounding is read."""
        pair = self.constant(var, value, owner)
        if self.recorder is not None and is_floating(var.aval) and var.aval.dtype in HALF:
            site = Site(owner, "forward", "parameter", var.aval.dtype, var.aval.shape, NO_SOURCE)
            self.recorder.observe(site, value, value, pair.low, [])
        return pair

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """The results of an operation, in its own dtypes."""
        arrays = cast_like([pair.low for pair in pairs], [atom.aval for atom in eqn.invars])
        as_traced = as_function(eqn, debug_info)
        if self.recorder is None or id(eqn) not in self.read:
            return [Pair(x, x) for x in as_traced(*arrays)]
        half = any(is_half(var.aval) for var in eqn.outvars)
        if half and not is_opaque(eqn) and eqn.primitive.name not in SUMS | PRODUCTS:
            fast = jax.lax.Precision.DEFAULT  # on a GPU TF32, in which half-precision operands are exact
            exact = results_of(eqn, [widened(x) for x in arrays], debug_info, true_half=False, precision=fast)
            lows = [
                narrowed(round_to(x, var.aval.dtype), var.aval.dtype) if is_half(var.aval) else x
                for x, var in zip(exact, eqn.outvars, strict=True)
            ]
        else:
            exact = lows = as_traced(*arrays)
        for var, x, low in zip(eqn.outvars, exact, lows, strict=True):
            if is_floating(var.aval):
                self.recorder.observe(site_of(eqn, var, place), x, x, low, [])
        return [Pair(x, x) for x in lows]


def telling(jaxpr) -> Iterator:
    """The equations that say something of a layer: what leaves it, its products, its casts to half precision."""
    for body in bodies(jaxpr):
        makers, paths, leaving = {}, {}, []
        for eqn in body.eqns:
            path = scope_of(eqn, body.scope)
            leaving += [var for var in eqn.invars if isinstance(var, core.Var) and paths.get(var, path) != path]
            makers.update(dict.fromkeys(eqn.outvars, eqn))
            paths.update(dict.fromkeys(eqn.outvars, path))
        if body.callers:  # what the program gives are the loss and the gradients
            leaving += [var for var in body.outvars if var in makers]
        telling = {id(eqn): eqn for eqn in body.eqns if casts_down(eqn)}
        for eqn in filter(None, (_origin(var, makers) for var in leaving)):
            telling[id(eqn)] = eqn
        yield from (eqn for eqn in telling.values() if not holds_bodies(eqn))


def _origin(var, makers: dict):
    """The equation where a value comes from that others may only have moved; None if that is not in this body."""
    while (eqn := makers.get(var)) is not None and eqn.primitive.name in _MOVES and not casts_down(eqn):
        var = eqn.invars[0]
    return eqn


_MOVES = frozenset({"convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "rev"})
