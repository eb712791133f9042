"""Runs a half-precision program twice at once: as it is, and as it would be without rounding.

Half-precision values are held in float32 and rounded after each operation, so that one can see what rounding did, leave
it out, or leave it out in some modules only. The second run, of the same operations without any rounding, is the
reference: the program in float32. Operations run one by one: no compiler may then join them and leave out a rounding.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mpjax.diagnosis.readings import Marks, Recorder, Site
from mpjax.diagnosis.rounding import round_to
from mpjax.precision.casting.binding import bind
from mpjax.precision.casting.jaxprs import as_function, is_transposed, opened, scope_of
from mpjax.precision.casting.operations import OPERATIONS
from mpjax.precision.casting.provenance import source_of
from mpjax.precision.casting.values import cast_like
from mpjax.precision.dtypes import FLOAT32, HALF, is_floating


class Pair(NamedTuple):
    """A value of the program.

    Attributes:
      wide: as it is in the reference.
      low: as it is in half precision; the same array where nothing has been rounded yet.
      path: the module that made it; None for an input.
      free: whether a module that does not round made it, or it comes from such a value: then it is float32, and what
        is not a product stays float32 with it, as JAX promotes.
      marks: its history.
    """

    wide: Any
    low: Any
    path: str | None = None
    free: bool = False
    marks: Marks = Marks()


class Place(NamedTuple):
    """Where in the program a jaxpr stands.

    Attributes:
      path: its named scopes.
      backward: whether it belongs to a backward pass.
      callers: the equations that hold it, innermost first.
    """

    path: str = ""
    backward: bool = False
    callers: tuple = ()


@dataclasses.dataclass(frozen=True)
class Emulator:
    """How to run a program.

    Attributes:
      rounds: module path to whether its operations and its stored parameters round.
      ranged: whether half precision has a largest and a smallest number; else it only has few bits.
      reference: whether to run the reference at all; else `wide` is `low`.
      isolated: whether each module gets the reference's values as its inputs, so that what it does wrong is its own;
        else errors are carried on.
      recorder: takes the reading of each result.
    """

    rounds: Callable[[str], bool] = lambda path: True
    ranged: bool = True
    reference: bool = True
    isolated: bool = False
    recorder: Recorder | None = None

    def run(self, jaxpr, inputs: Sequence, owners: Sequence[str] = ()) -> list[Pair]:
        """The outputs of a closed jaxpr.

        Args:
          jaxpr: the program.
          inputs: arrays; those that it takes in half precision may be float32.
          owners: the module path of each input that belongs to one; "" otherwise, and for those not given.
        """
        owners = [*owners, *[""] * (len(inputs) - len(owners))]
        variables = opened(jaxpr)[0].invars
        pairs = [self._input(*each) for each in zip(variables, inputs, owners, strict=True)]
        return self.run_body(jaxpr, pairs, Place())

    def _input(self, var, value, owner: str) -> Pair:
        pair = self._constant(var, value, owner)
        if self.recorder is None or not is_floating(var.aval):
            return pair
        if var.aval.dtype in HALF:
            site = Site(owner, "forward", "parameter", var.aval.dtype, var.aval.shape, _NO_SOURCE)
            return pair._replace(marks=self.recorder.observe(site, pair.wide, pair.wide, pair.low, []))
        finite = jnp.isfinite(pair.wide).all()
        return pair._replace(marks=Marks(finite, finite))

    def _constant(self, var, value, owner: str) -> Pair:
        value, rounds = _widened(value), self.rounds(owner)
        low = self._rounded(value, var.aval, rounds)
        return Pair(value if self.reference else low, low, None, not rounds and _is_half(var.aval))

    def run_body(self, jaxpr, inputs: Sequence[Pair], place: Place) -> list[Pair]:
        """The outputs of a jaxpr, open or closed, that stands somewhere in the program."""
        from mpjax.diagnosis.control_flow import HANDLERS

        body, consts = opened(jaxpr)
        constants = [self._constant(var, c, place.path) for var, c in zip(body.constvars, consts, strict=True)]
        env: dict[Any, Pair] = dict(zip(body.constvars, constants, strict=True))
        env.update(zip(body.invars, inputs, strict=True))
        last = _last_uses(body)

        def read(atom) -> Pair:
            if isinstance(atom, core.Literal):
                value = _widened(np.asarray(atom.val))
                return Pair(value, value)
            return env[atom]

        for index, eqn in enumerate(body.eqns):
            backward = place.backward or is_transposed(eqn)
            here = place._replace(path=scope_of(eqn, place.path), backward=backward)
            pairs = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in HANDLERS:
                within = here._replace(callers=(eqn, *place.callers))
                outputs = HANDLERS[eqn.primitive.name](self, eqn, pairs, within)
            else:
                outputs = self._apply(eqn, pairs, here, body.debug_info)
            env.update(zip(eqn.outvars, outputs, strict=True))
            for var in last.get(index, ()):
                del env[var]
        return [read(atom) for atom in body.outvars]

    def _apply(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        some_half = any(_is_half(atom.aval) for atom in (*eqn.outvars, *eqn.invars))
        rounds = self.rounds(place.path) and (_casts_down(eqn) or not any(pair.free for pair in pairs))
        lows = [self._taken(pair, var.aval, place.path, rounds) for pair, var in zip(pairs, eqn.invars, strict=True)]
        wides = [pair.wide for pair in pairs] if self.reference else lows
        opaque = some_half and _is_opaque(eqn)
        wide = _bind(eqn, wides, debug_info, true_half=opaque)
        same = all(low is w for low, w in zip(lows, wides, strict=True))
        exact = wide if same else _bind(eqn, lows, debug_info, true_half=opaque)
        sums = eqn.primitive.name in _SUMS
        if some_half and rounds and (sums or (self.ranged and eqn.primitive.name in _PRODUCTS)):
            room = 1.0 if self.ranged else _room(lows)
            given = [x * room if is_floating(x) else x for x in lows]
            low = [x / room for x in _bind(eqn, given, debug_info, true_half=True)]
        else:
            low = [self._rounded(x, var.aval, rounds) for x, var in zip(exact, eqn.outvars, strict=True)]
        outputs = []
        for var, w, x, y in zip(eqn.outvars, wide, exact, low, strict=True):
            marks = Marks()
            if self.recorder is not None and is_floating(var.aval):
                given = [pair.marks for pair in pairs]
                marks = self.recorder.observe(_site(eqn, var, place), w, x, y, given)
            outputs.append(Pair(w if self.reference else y, y, place.path, some_half and not rounds, marks))
        return outputs

    def _taken(self, pair: Pair, aval, path: str, rounds: bool):
        """An operand as an equation in `path` gets it: in its dtype, and if isolated free of other modules' errors."""
        elsewhere = self.isolated and pair.path != path
        value = pair.wide if elsewhere and is_floating(aval) else pair.low
        return self._rounded(value, aval, rounds) if elsewhere or pair.free else value

    def _rounded(self, value, aval, rounds: bool):
        return round_to(value, aval.dtype, ranged=self.ranged) if rounds and _is_half(aval) else value


_NO_SOURCE = "(no source line)"

_SUMS = frozenset({"reduce_sum", "reduce_window_sum", "cumsum", "scatter-add", "scatter-sub"})
_PRODUCTS = frozenset({"reduce_prod", "cumprod", "integer_pow", "scatter-mul"})
"""They round after each of many additions or multiplications, which only the device itself does as it does."""

_BITS = frozenset({"nextafter", "bitcast_convert_type"})


def _is_half(aval) -> bool:
    return is_floating(aval) and aval.dtype in HALF


def _casts_down(eqn) -> bool:
    """Whether operands are brought to half precision whatever they are: by a product in a layer, or by a cast."""
    name = eqn.primitive.name
    to_half = name == "convert_element_type" and eqn.params["new_dtype"] in HALF
    return to_half or OPERATIONS.rule(name) == "low"


def _is_opaque(eqn) -> bool:
    """Whether an equation means something in its own dtypes only: kernels, bits."""
    return eqn.primitive.name in _BITS or OPERATIONS.rule(eqn.primitive.name) == "as_traced"


def _room(values: list):
    """A power of two that brings values to where float16 has all its bits and their sum does not overflow."""
    floats = [x for x in values if is_floating(x) and x.size]
    if not floats:
        return 1.0
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x)) for x in floats))
    top = max(0, 15 - int(np.ceil(np.log2(max(x.size for x in floats)))))
    return jnp.where((largest > 0) & jnp.isfinite(largest), jnp.exp2(top - jnp.ceil(jnp.log2(largest))), 1.0)


def _site(eqn, var, place: Place) -> Site:
    direction = "backward" if place.backward else "forward"
    source = source_of((eqn, *place.callers))
    return Site(place.path, direction, eqn.primitive.name, np.dtype(var.aval.dtype), tuple(var.aval.shape), source)


def _last_uses(body) -> dict[int, list]:
    """After which equation each variable can be forgotten."""
    kept = {var for var in body.outvars if not isinstance(var, core.Literal)}
    last: dict[Any, int] = {}
    for index, eqn in enumerate(body.eqns):
        for var in (*eqn.invars, *eqn.outvars):
            if not isinstance(var, core.Literal):
                last[var] = index
    after: dict[int, list] = {}
    for var, index in last.items():
        if var not in kept:
            after.setdefault(index, []).append(var)
    return after


def _widened(value):
    return jnp.asarray(value).astype(FLOAT32) if getattr(value, "dtype", None) in HALF else value


def _bind(eqn, values: list, debug_info, *, true_half: bool) -> list:
    """The results of an equation, those of half precision held in float32."""
    if true_half:
        given = cast_like(values, (atom.aval for atom in eqn.invars))
        return [_widened(x) for x in as_function(eqn, debug_info)(*given)]
    if eqn.primitive.name == "convert_element_type":
        new = eqn.params["new_dtype"]
        return [jax.lax.convert_element_type(values[0], FLOAT32 if new in HALF else new)]
    params = {
        name: FLOAT32 if name in ("preferred_element_type", "dtype") and value in HALF else value
        for name, value in eqn.params.items()
    }
    if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
        # Float32 itself, where a device would take fewer bits; an algorithm of the program's may be for half only.
        params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    return list(bind(eqn.primitive, values, params))
