"""Runs a half-precision program and, at the same time, its float32 reference.

Half-precision values are computed in float32 and rounded after each operation. The effect of rounding can therefore be
measured, and rounding can be disabled everywhere or in some modules only. The reference runs the same operations
without any rounding. Operations run one by one, because a compiler could fuse them and omit a rounding.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mpjax.diagnosis.arithmetic import (
    as_float32,
    casts_down,
    in_half_dtype,
    is_half,
    is_opaque,
    results_of,
    room_for,
    round_to,
)
from mpjax.diagnosis.compile_ahead import give_back
from mpjax.diagnosis.control_flow import HANDLERS as CONTROL_FLOW
from mpjax.diagnosis.control_flow import shard_map
from mpjax.diagnosis.float8 import saturated, with_own_scales
from mpjax.diagnosis.formats import FLOAT8, NARROW
from mpjax.diagnosis.layers import LayerRecorder
from mpjax.diagnosis.loss_path import only_in_derivative
from mpjax.diagnosis.measurements import Marks
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.progress import SILENT, Progress
from mpjax.diagnosis.readings import Recorder
from mpjax.diagnosis.sites import is_addition, parameter_site, site_of
from mpjax.precision.casting.jaxprs import is_recomputed, is_transposed, opened
from mpjax.precision.casting.primitives import CALLS, MATRIX_PRODUCTS, PRODUCTS, SUMS
from mpjax.precision.casting.walk import called, evaluated
from mpjax.precision.dtypes import BFLOAT16, is_floating
from mpjax.precision.float8.scaling import SATURATE


def everywhere(path: str) -> bool:
    """Always True, as `Emulator.rounds`: every module rounds."""
    return True


def nothing(eqn, place: Place) -> bool:
    """Always False, as `Emulator.keeps`: no result stays in float32."""
    return False


def sums_of_cotangents(eqn, place: Place) -> bool:
    """True, as `Emulator.keeps`, for a backward equation that sums an array or adds a term to a running sum."""
    return place.backward and (eqn.primitive.name in SUMS or is_addition(eqn, place.callers))


def nowhere(path: str) -> bool:
    """Always False, as `Emulator.rounds`: no module rounds."""
    return False


@dataclasses.dataclass(frozen=True)
class Emulator:
    """Emulates a program in half precision and, beside it, in float32. The attributes are its settings.

    Attributes:
      rounds: `(module path) -> bool`: True if the module's operations and stored parameters are rounded.
      top: True if large values overflow as in half precision; False gives half precision float32's largest exponents.
      bottom: True if small values underflow as in half precision; False gives it float32's smallest exponents.
      keeps: `(equation, place) -> bool`: True if the results of an equation stay in float32 until the next equation
        rounds them.
      reference: True to run the float32 reference too; otherwise `Pair.wide` is `Pair.low`.
      isolated: True to give each module the reference's values as inputs, which measures the module's own error;
        otherwise errors propagate from module to module.
      recorder: takes a reading of each result; None takes none.
      done: called after each operation; a loop is one operation. `run` sets it.
      exact: the float32 values of the program's constants, by `id`, as in `Constants`. `run` sets it.
      derivative: the variables of the backward pass, as in `only_in_derivative`. `run` sets it.
    """

    rounds: Callable[[str], bool] = everywhere
    top: bool = True
    bottom: bool = True
    keeps: Callable[[Any, Place], bool] = nothing
    reference: bool = True
    isolated: bool = False
    recorder: Recorder | LayerRecorder | None = None
    done: Callable[[], None] = lambda: None
    exact: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    derivative: frozenset = frozenset()

    @property
    def ranged(self) -> bool:
        """True if values overflow and underflow as in half precision."""
        return self.top and self.bottom

    def run(
        self,
        jaxpr,
        inputs: Sequence,
        owners: Sequence[str] = (),
        progress: Progress = SILENT,
        exact: Mapping[int, np.ndarray] | None = None,
    ) -> list[Pair]:
        """Emulates a closed jaxpr in half precision and, with `reference`, in float32.

        The operations run one by one, and `recorder` gets a reading of each. Returns a `Pair` for each output.

        Args:
          jaxpr: the program.
          inputs: the input arrays; half-precision inputs may be given in float32.
          owners: the module path of each input, "" for inputs outside modules; may be shorter than `inputs`.
          progress: the progress bar that shows the run.
          exact: the float32 values of the program's constants, by `id`; empty if omitted.
        """
        reads = "each module alone" if self.isolated else "half precision and float32"
        done = progress.started(None if self.recorder is None else reads, _count(jaxpr))
        owners = [*owners, *[""] * (len(inputs) - len(owners))]
        variables = opened(jaxpr)[0].invars
        pairs = [self.entered(*entry) for entry in zip(variables, inputs, owners, strict=True)]
        ready = dataclasses.replace(self, done=done, exact=exact or {}, derivative=only_in_derivative(jaxpr))
        return ready.run_body(jaxpr, pairs, Place())

    def recording(self, recorder) -> Self:
        """Copies the emulator with another recorder; None takes no readings."""
        return dataclasses.replace(self, recorder=recorder)

    def entered(self, var, value, owner: str) -> Pair:
        """Makes the pair of a program input, and records how rounding changes it if `var` has half precision.

        Args:
          var: the variable of the input in the program, with its dtype.
          value: the array.
          owner: the module path of the input.
        """
        pair = self.constant(var, value, owner)
        if self.recorder is None or not is_floating(var.aval):
            return pair
        if var.aval.dtype in NARROW:
            site = parameter_site(owner, "forward", var.aval)
            wide = as_float32(pair.wide)
            return pair._replace(marks=self.recorder.observe(site, wide, wide, as_float32(pair.low), []))
        finite = jnp.isfinite(pair.wide).all()
        return pair._replace(marks=Marks(finite, finite))

    def constant(self, var, value, owner: str) -> Pair:
        """Makes the pair of an input or constant array, rounded to the dtype of `var` if module `owner` rounds."""
        value, rounds = as_float32(value), self.rounds(owner)
        low = self._rounded(value, var.aval, rounds)
        return self.held(Pair(value, low, None, not rounds and is_half(var.aval)), var.aval)

    def with_exact(self, pairs: list[Pair], atoms: Sequence, place: Place, eqn=None) -> list[Pair]:
        """Gives each constant among `pairs` its value in the float32 program as reference value.

        Other pairs are unchanged. If an operand becomes zero or inf in half precision, a reading with the operation
        "constant ..." is recorded.

        Args:
          pairs: the operands of an equation, or the outputs of a body.
          atoms: the variables and literals of the pairs.
          place: the module and direction of the equation or body.
          eqn: the equation; None for the outputs of a body.
        """
        if not any(id(atom) in self.exact for atom in atoms):
            return pairs
        rounds = self.rounds_in(place, eqn, pairs)
        return [
            self._exact(atom, pair, place, rounds, eqn) if id(atom) in self.exact else pair
            for atom, pair in zip(atoms, pairs, strict=True)
        ]

    def _exact(self, atom, pair: Pair, place: Place, rounds: bool, eqn) -> Pair:
        """Makes the pair of a constant with its float32 value as reference, as in `with_exact`."""
        exact, value, marks = self.exact[id(atom)], np.asarray(as_float32(pair.low)), Marks()
        low = value if rounds and self.ranged else self._rounded(exact, atom.aval, rounds)
        lost = (exact != 0) & (value == 0) | np.isfinite(exact) & ~np.isfinite(value)
        if self.recorder is not None and eqn is not None and lost.any():
            site = site_of(eqn, atom, place)._replace(
                operation=f"constant {exact:g}" if exact.ndim == 0 else "constant"
            )
            marks = self.recorder.observe(site, exact, exact, value, [])
        return self.held(Pair(exact, low, place.path, not rounds and is_half(atom.aval), marks), atom.aval)

    def held(self, pair: Pair, aval) -> Pair:
        """Stores a rounded value in its half dtype until its next use, to save memory.

        Values that are not rounded, or rounded with float32's exponents, stay float32. Without a reference, `wide`
        becomes `low`.

        Args:
          pair: the value.
          aval: the abstract value of its variable in the program.
        """
        rounded = is_half(aval) and not pair.free and (self.ranged or aval.dtype == BFLOAT16)
        if rounded and pair.low.dtype != aval.dtype:
            pair = pair._replace(low=in_half_dtype(pair.low, aval.dtype))
        return pair if self.reference else pair._replace(wide=pair.low)

    def run_body(self, jaxpr, inputs: list[Pair], place: Place) -> list[Pair]:
        """Emulates an open or closed jaxpr inside the program. Returns a pair for each output.

        Args:
          jaxpr: the body to run.
          inputs: the input pairs. The list is emptied, so that a value is freed after its last use.
          place: the module, direction and callers of the body's equations.
        """
        count = itertools.count(1)

        def constant(atom, array) -> Pair:
            if isinstance(atom, core.Literal):
                value = as_float32(np.asarray(array, getattr(atom.aval, "dtype", None)))
                return Pair(value, value)
            return self.constant(atom, array, place.path)

        def apply(eqn, path: str, pairs: list[Pair], debug_info) -> list[Pair]:
            if next(count) % _GIVE_BACK_EVERY == 0:
                give_back()
            backward = place.backward or is_transposed(eqn) or not self.derivative.isdisjoint(eqn.outvars)
            backward = backward and not is_recomputed(eqn)
            here = place._replace(path=path, backward=backward)
            pairs[:] = self.with_exact(pairs, eqn.invars, here, eqn)
            name, within = eqn.primitive.name, here._replace(callers=(eqn, *place.callers))
            if name in CALLS and str(eqn.params.get("name")).startswith(SATURATE):
                return [self.held(saturated(self, eqn, pairs[0], here), eqn.outvars[0].aval)]
            if name in CALLS:
                return self.run_body(called(eqn), pairs, within)
            if name in _HANDLERS:
                outputs = _HANDLERS[name](dataclasses.replace(self, done=lambda: None), eqn, pairs, within)
            else:
                outputs = self.applied(eqn, pairs, here, debug_info)
            self.done()
            return outputs

        outputs = evaluated(jaxpr, _taken_out(inputs), constant, apply, place.path)
        return self.with_exact(outputs, opened(jaxpr)[0].outvars, place)

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Computes the results of an operation in half precision and in the reference, and records their readings.

        Empties `pairs`, the list of the operands, so that values without further uses are freed. Returns a pair for
        each result.
        """
        some_half = any(is_half(atom.aval) for atom in (*eqn.outvars, *eqn.invars))
        rounds = self.rounds_in(place, eqn, pairs)
        lows = [self.taken(pair, var.aval, place.path, rounds) for pair, var in zip(pairs, eqn.invars, strict=True)]
        wides = [pair.wide for pair in pairs] if self.reference else lows
        given_marks = [pair.marks for pair in pairs]
        pairs.clear()
        opaque = some_half and is_opaque(eqn)
        wide = results_of(eqn, wides, debug_info, true_half=opaque)
        same = all(low is w for low, w in zip(lows, wides, strict=True))
        exact = wide if same else results_of(eqn, lows, debug_info, true_half=opaque)
        wide = with_own_scales(eqn, wide, exact) if self.reference else wide
        ranged = self.ranged or any(var.aval.dtype == BFLOAT16 for var in eqn.outvars)  # bfloat16 has float32's range
        native = SUMS | PRODUCTS if ranged else SUMS
        given_dtypes = {getattr(atom.aval, "dtype", None) for atom in eqn.invars}
        if BFLOAT16 in given_dtypes:
            native |= MATRIX_PRODUCTS  # a CPU with native products in bfloat16 adds in its own order
        if given_dtypes & set(FLOAT8):
            native = frozenset()  # devices add float8 products in float32
        if some_half and rounds and eqn.primitive.name in native:
            room = 1.0 if ranged else room_for(lows)
            scaled = lows if ranged else [x * room if is_floating(x) else x for x in lows]
            low = [x / room for x in results_of(eqn, scaled, debug_info, true_half=True)]
            if self.top != self.bottom:
                low = [self._rounded(x, var.aval, rounds) for x, var in zip(low, eqn.outvars, strict=True)]
            del scaled
        else:
            low = [self._rounded(x, var.aval, rounds) for x, var in zip(exact, eqn.outvars, strict=True)]
        del lows, wides  # frees operands without further uses before the results are read
        outputs = []
        for var, w, x, y in zip(eqn.outvars, wide, exact, low, strict=True):
            marks = Marks()
            if self.recorder is not None and is_floating(var.aval):
                marks = self.recorder.observe(site_of(eqn, var, place), w, x, y, given_marks)
            outputs.append(self.held(Pair(w, y, place.path, some_half and not rounds, marks), var.aval))
        return outputs

    def rounds_in(self, place: Place, eqn, pairs: list[Pair]) -> bool:
        """True if the results of an equation are rounded. `eqn` is None for the outputs of a body.

        Results are not rounded if their module does not round, if `keeps` says so, or if an operand is free
        (`Pair.free`): a float32 operand promotes the results to float32. A free operand does not matter to a cast to
        half precision or a matrix product (`casts_down`), at the end of a body, or if `keeps` is set.
        """
        if not self.rounds(place.path) or (eqn is not None and self.keeps(eqn, place)):
            return False
        return eqn is None or casts_down(eqn) or self.keeps is not nothing or not any(pair.free for pair in pairs)

    def taken(self, pair: Pair, aval, path: str, rounds: bool):
        """The value of an operand as an equation in module `path` gets it: in float32, rounded to half precision.

        In an isolated run, an operand from another module is the reference's value, without that module's errors.

        Args:
          pair: the operand.
          aval: its abstract value in the program.
          path: the module of the equation.
          rounds: True if the equation rounds. An operand that is not rounded yet, because it is free or the
            reference's, is then rounded here.
        """
        elsewhere = self.isolated and pair.path != path
        value = as_float32(pair.wide if elsewhere and is_floating(aval) else pair.low)
        return self._rounded(value, aval, rounds) if elsewhere or pair.free else value

    def _rounded(self, value, aval, rounds: bool):
        return round_to(value, aval.dtype, top=self.top, bottom=self.bottom) if rounds and is_half(aval) else value


_HANDLERS = {**CONTROL_FLOW, "shard_map": shard_map}
_GIVE_BACK_EVERY = 16


def _count(jaxpr) -> int:
    """Counts the operations, including those inside calls. A loop or a branch is one operation."""
    body = opened(jaxpr)[0]
    return sum(_count(called(eqn)) if eqn.primitive.name in CALLS else 1 for eqn in body.eqns)


def _taken_out(values: list) -> Iterator:
    """Yields the values of a list, and removes each from the list before it is used, so that it can be freed."""
    while values:
        yield values.pop(0)
