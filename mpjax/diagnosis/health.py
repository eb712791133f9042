"""Checks if a step is healthy: finite, with an accurate loss, and without gradients lost to underflow."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.arithmetic import as_float32, results_of
from mpjax.diagnosis.emulate import Emulator, everywhere, nothing, nowhere
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import ratio
from mpjax.precision.casting.primitives import ARRANGES, MATRIX_PRODUCTS, REPEATS, SUMS
from mpjax.precision.dtypes import is_floating


@dataclasses.dataclass(frozen=True)
class Terms(Emulator):
    """An emulator without rounding, in which `Pair.wide` is the sum of the magnitudes of the terms of a value.

    The error of a loss whose terms cancel is compared with this sum: for 3 - 2 it is 5. The terms of a scalar sum,
    difference or mean are the terms of its operands. Every other result is one term, because cancellation within a
    layer is a fault of the layer.
    """

    rounds: Callable[[str], bool] = nowhere

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Computes the results of an equation, with the sums of the magnitudes of their terms as `wide`.

        Empties `pairs`.
        """
        floating = [is_floating(atom.aval) for atom in eqn.invars]
        terms = [jnp.abs(as_float32(p.wide)) if f else p.low for p, f in zip(pairs, floating, strict=True)]
        alone = [pair._replace(wide=pair.low) for pair in pairs]
        pairs.clear()
        outputs = super().applied(eqn, alone, place, debug_info)
        name = eqn.primitive.name
        if any(np.size(pair.low) != 1 for pair in outputs):
            return outputs
        if name == "sub" and floating[0]:
            added = [terms[0] + terms[1]]
        elif name in _ADDS or (name == "mul" and any(np.size(term) == 1 for term in terms)):
            added = results_of(eqn, terms, debug_info, true_half=False)
        else:
            return outputs
        return [pair._replace(wide=wide) for pair, wide in zip(outputs, added, strict=True)]


_ADDS = ARRANGES | {"add", "add_any", "reduce_sum", "neg", "div", "convert_element_type"}
"""Primitives that pass on the terms of a sum. The next absolute value drops the minus sign of `neg`."""


_ADDS_UP = MATRIX_PRODUCTS | SUMS
_MOVES = ARRANGES.difference(REPEATS) | {"convert_element_type", "neg"}


@dataclasses.dataclass(frozen=True)
class Spread(Emulator):
    """An emulator without rounding, in which `Pair.wide` is the root of the sum of squares of a value's terms.

    The terms of a gradient are the terms of the last product or sum in its backward pass, such as one for each example.
    At the end of training they cancel. The error is then large relative to the gradient, but not relative to `wide`.
    """

    rounds: Callable[[str], bool] = nowhere

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Computes the results of an equation, with the root sum of squares of their terms as `wide`.

        Empties `pairs`.
        """
        name, operands = eqn.primitive.name, list(pairs)
        pairs[:] = [pair._replace(wide=pair.low) for pair in pairs]
        outputs = super().applied(eqn, pairs, place, debug_info)
        floating = [is_floating(atom.aval) for atom in eqn.invars]
        if name in _ADDS_UP and place.backward:
            squares = [jnp.square(as_float32(p.low)) if f else p.low for p, f in zip(operands, floating, strict=True)]
            spread = [jnp.sqrt(x) for x in results_of(eqn, squares, debug_info, true_half=False)]
        elif name in _MOVES or (name in ("mul", "div") and any(np.size(p.low) == 1 for p in operands)):
            norms = [jnp.abs(as_float32(p.wide)) if f else p.low for p, f in zip(operands, floating, strict=True)]
            spread = results_of(eqn, norms, debug_info, true_half=False)
        else:
            return outputs
        return [pair._replace(wide=wide) for pair, wide in zip(outputs, spread, strict=True)]


LOST = 0.5
"""The relative error above which a gradient in float8 is wrong. Healthy gradients have a tenth to a fifth."""

WRONG = 0.3
"""The error from which a gradient in half precision is wrong, relative to the gradient or, if larger, to its terms."""

_SMALL, _MINOR = 1e-3, 0.1
"""Fractions of the largest gradient's norm.

In float8, a gradient whose norm is below the first fraction is ignored. In half precision, the error of a gradient
whose norm is below the second is relative to that fraction of the largest norm.
"""


@dataclasses.dataclass(frozen=True)
class Reference:
    """The float32 step that a half-precision step is compared with.

    Attributes:
      program: the half-precision program with float32 constants; the float32 program if the two compute differently.
      outputs: the loss and the gradients in float32, without a loss scale.
      tolerance: as in `mpjax.diagnose`.
      without_float8: if products are in float8, computes the loss and the gradients, without a loss scale, of the step
        with products in the compute dtype; else None.
      accepts: the largest accepted relative error of a gradient. None means `LOST` in float8, else `WRONG`. In half
        precision, None also means that gradients are not the fault: a repair with an accurate loss is enough.
      same_numbers: False if the two programs draw different random numbers, so that gradients cannot be compared.
    """

    program: Program
    outputs: Sequence[np.ndarray]
    tolerance: float
    without_float8: Callable[[], Sequence] | None = None
    accepts: float | None = None
    same_numbers: bool = True

    @property
    def limit(self) -> float:
        """The relative error above which a gradient is wrong: `accepts`, or if None `LOST` in float8, else `WRONG`."""
        return self.accepts or (WRONG if self.without_float8 is None else LOST)

    def has_loss(self, low: Sequence, scale: float) -> bool:
        """True if a step is finite, and its loss and its gradients are accurate.

        The loss has an error of at most `tolerance`, and each gradient one of at most `limit`
        (`per_gradient_errors`). A loss with a larger error is harmless if it is near zero (`loss_is_small`) and the
        gradients together are off by at most half their norm (`has_gradients`).

        Args:
          low: the scaled loss and the scaled gradients of the step.
          scale: the loss scale of the step.
        """
        if not all_finite(low):
            return False
        if loss_error(self.outputs[0], low[0] / scale) > self.tolerance:
            return self.loss_is_small(low, scale) and self.has_gradients(low, scale)
        return max(self.per_gradient_errors(low, scale), default=0.0) <= self.limit

    def is_repaired_by(self, low: Sequence, scale: float) -> bool:
        """True if a repaired step, which must be finite, is accurate enough.

        It is accurate enough if `has_loss` is True. If the loss is right, errors of gradients matter only in float8, or
        if they were the fault (`accepts` is set).

        Args:
          low: as in `has_loss`.
          scale: as in `has_loss`.
        """
        judged = self.accepts is not None or self.without_float8 is not None
        right = loss_error(self.outputs[0], low[0] / scale) <= self.tolerance
        return (right and not judged) or self.has_loss(low, scale)

    def per_gradient_errors(self, low: Sequence, scale: float) -> list[float]:
        """The relative error of each gradient, in the Euclidean norm, as a list in the order of the gradients.

        The loss may hide these errors: a derivative adds values that the loss does not add, and an outlier in float8
        may destroy the gradient of one layer. An error above the limit (in float8, `LOST`) becomes zero if float32 does
        not determine the gradient or, in float8, if the gradient is lost without float8 too. In float8, the error of a
        gradient below `_SMALL` of the largest norm is zero. In half precision, an error is relative to at least
        `_MINOR` of the largest norm and, above the limit, to at least the norm of the gradient's terms with random
        signs; the list is empty without `same_numbers`.

        Args:
          low: as in `has_loss`.
          scale: as in `has_loss`.
        """
        gradients = [np.asarray(x) / scale for x in low[1:]]
        if self.without_float8 is None:
            return self._errors_in_half(gradients) if self.same_numbers else []
        errors = self._gradient_errors(gradients)
        if max(errors, default=0.0) <= LOST:
            return errors
        return [
            0.0 if error > LOST and (wider > LOST or not self.determined(slice(index, index + 1))) else error
            for index, (error, wider) in enumerate(zip(errors, self._wider_errors, strict=True), start=1)
        ]

    def _errors_in_half(self, gradients: Sequence) -> list[float]:
        """The errors of `per_gradient_errors` without float8."""
        norms = [float(np.linalg.norm(np.asarray(wide, np.float64))) for wide in self.outputs[1:]]
        whole = _MINOR * max(norms, default=0.0)
        pairs = zip(self.outputs[1:], gradients, strict=True)
        off = [float(np.linalg.norm(np.asarray(w, np.float64) - np.asarray(g, np.float64))) for w, g in pairs]
        errors = [_fraction(error, max(norm, whole)) for error, norm in zip(off, norms, strict=True)]
        if max(errors, default=0.0) <= self.limit:
            return errors
        errors = [
            error if error <= self.limit else _fraction(difference, max(norm, whole, spread))
            for error, difference, norm, spread in zip(errors, off, norms, self._spreads, strict=True)
        ]
        return [
            0.0 if error > self.limit and not self.determined(slice(index, index + 1)) else error
            for index, error in enumerate(errors, start=1)
        ]

    @functools.cached_property
    def _spreads(self) -> list[float]:
        """The Euclidean norm that each gradient would have if its terms had random signs (`Spread`)."""
        pairs = Spread().run(*self.program.at(1.0))[1:]
        return [float(np.linalg.norm(np.asarray(pair.wide, np.float64))) for pair in pairs]

    @functools.cached_property
    def _wider_errors(self) -> list[float]:
        """The relative errors of the gradients if products are in the compute dtype in place of float8."""
        assert self.without_float8 is not None
        return self._gradient_errors(self.without_float8()[1:])

    def _gradient_errors(self, gradients: Sequence) -> list[float]:
        """The relative error of each gradient; 0 if its float32 norm is at most `_SMALL` of the largest norm."""
        norms = [float(np.linalg.norm(np.asarray(wide, np.float64))) for wide in self.outputs[1:]]
        return [
            0.0 if norm <= _SMALL * max(norms) else distance([wide], [gradient])
            for norm, wide, gradient in zip(norms, self.outputs[1:], gradients, strict=True)
        ]

    def fault(self, low: Sequence, scale: float) -> float:
        """How far a step is from the reference: at most `tolerance` if loss and gradients are within their limits.

        The distance is the error of the loss or, if larger, the worst error of a gradient times `tolerance / limit`. It
        is inf if the step is not finite.

        Args:
          low: as in `has_loss`.
          scale: as in `has_loss`.
        """
        if not all_finite(low):
            return math.inf
        lost = max(self.per_gradient_errors(low, scale), default=0.0) / self.limit * self.tolerance
        return max(loss_error(self.outputs[0], low[0] / scale), lost)

    def loss_is_small(self, low: Sequence, scale: float) -> bool:
        """True if a large relative error of the loss is harmless, because it is near zero.

        Either its terms cancel (`terms_cancel`), or float32 does not determine it (`determined`). The arguments are as
        in `has_loss`.
        """
        return self.terms_cancel(low, scale) or not self.determined(slice(1))

    def terms_cancel(self, low: Sequence, scale: float) -> bool:
        """True if the loss and its error are both at most `tolerance` times the sum of the magnitudes of its terms.

        The arguments are as in `has_loss`.
        """
        loss = float(self.outputs[0])
        return max(abs(loss), abs(float(low[0]) / scale - loss)) <= self.tolerance * self.terms

    def has_gradients(self, low: Sequence, scale: float) -> bool:
        """True if all gradients together are off by at most half their norm, or if float32 does not determine them.

        Args:
          low: as in `has_loss`.
          scale: as in `has_loss`.
        """
        return self.gradient_error(low, scale) <= 0.5 or not self.determined(slice(1, None))

    def determined(self, chosen: slice) -> bool:
        """True if changes in the last float32 bits of the inputs change the chosen outputs by at most `tolerance`.

        The change of the chosen outputs is relative to their Euclidean norm, all together. The inputs change once in
        each of two opposite directions. The smaller change of the outputs decides, because the change in the opposite
        direction may cross a jump, such as that of a truncation. The emulated runs for this are cached.

        Args:
          chosen: the slice of the outputs to look at; output 0 is the loss, the others are the gradients.
        """
        return any(distance(self.outputs[chosen], nudged[chosen]) <= self.tolerance for nudged in self._nudged)

    def gradient_error(self, low: Sequence, scale: float) -> float:
        """The relative error of all gradients together, in the Euclidean norm.

        Args:
          low: as in `has_loss`; the loss in it does not count.
          scale: as in `has_loss`.
        """
        return distance(self.outputs[1:], [x / scale for x in low[1:]])

    @functools.cached_property
    def terms(self) -> float:
        """The sum of the magnitudes of the loss's terms (`Terms`), without the loss scale."""
        return float(Terms().run(*self.program.at(1.0))[0].wide)

    @functools.cached_property
    def _nudged(self) -> list[list[np.ndarray]]:
        """The outputs for inputs changed by 2^-22 of a value (two epsilons), with random signs, and by the opposite."""
        return [outputs_of(WITHOUT_ROUNDING, self.program._replace(inputs=self._inputs(by)), 1.0) for by in _NUDGES]

    def _inputs(self, by: float) -> list:
        """Copies the program's inputs, with each floating value changed by a relative `by`, with a random sign."""
        keys = iter(jax.random.split(jax.random.key(0), len(self.program.inputs)))
        return [_nudged(x, next(keys), by) if is_floating(x) else x for x in self.program.inputs]


_NUDGES = (2.0**-22, -(2.0**-22))

_COUNTS = 2.0**24
"""The magnitude up to which float32 represents every integer."""


def _nudged(values: jax.Array, key: jax.Array, by: float) -> jax.Array:
    """Multiplies each value by 1 + `by` or 1 - `by`, at random; whole numbers up to `_COUNTS` stay exact.

    Whole numbers may be counts or indices. The result is float32.
    """
    values = values.astype(jnp.float32)
    signs = jax.random.rademacher(key, values.shape, jnp.float32)
    whole = (values == jnp.round(values)) & (jnp.abs(values) <= _COUNTS)
    return jnp.where(whole, values, values * (1 + signs * np.float32(by)))


ROUNDING = Emulator(reference=False)
WITHOUT_ROUNDING = Emulator(rounds=nowhere, reference=False)


def is_repaired(
    reference: Reference,
    program: Program,
    scale: float,
    rounds: Callable[[str], bool] = everywhere,
    keeps: Callable[[Any, Place], bool] = nothing,
) -> bool:
    """True if an emulated step is finite, accurate (`Reference.is_repaired_by`), and loses no gradient to underflow.

    At most `reference.tolerance` of each gradient's norm may underflow to zero (`lost_fractions`).

    Args:
      reference: the float32 step to compare with.
      program: the step.
      scale: the loss scale.
      rounds: the modules that round, as in `Emulator`.
      keeps: the operations whose results stay in float32 until their use, as in `Emulator`.
    """
    low = outputs_of(Emulator(rounds=rounds, keeps=keeps, reference=False), program, scale)
    if not all_finite(low) or not reference.is_repaired_by(low, scale):
        return False
    return max(lost_fractions(reference, program, scale, low, rounds), default=0.0) <= reference.tolerance


def outputs_of(emulator: Emulator, program: Program, scale: float) -> list[np.ndarray]:
    """Emulates a step. Returns `[loss, *gradients]` as NumPy arrays, multiplied by the loss scale.

    The values are those that `emulator` rounds (`Pair.low`), in their half dtypes where rounded.
    """
    return jax.device_get([pair.low for pair in emulator.run(*program.at(scale))])


def lost_fractions(
    reference: Reference, program: Program, scale: float, low: Sequence, rounds: Callable = everywhere
) -> list[float]:
    """The fraction of each gradient's Euclidean norm that underflows to zero, as a list in the order of the gradients.

    If a fraction is above the tolerance, the step runs again with unlimited range, and the fractions are of the norms
    in that run. A gradient whose error in that run is as large as its norm then gets 0: its zeros come from rounded
    terms that cancel, and not from underflow.

    Args:
      reference: as in `is_repaired`.
      program: as in `is_repaired`.
      scale: as in `is_repaired`.
      low: the scaled loss and the scaled gradients of the step.
      rounds: as in `is_repaired`.
    """
    wide = [np.asarray(x, np.float64) * scale for x in reference.outputs[1:]]
    lost = [_zero_fraction(w, x) for w, x in zip(wide, low[1:], strict=True)]
    if max(lost, default=0.0) <= reference.tolerance:
        return lost
    # A zero can also come from rounded terms that cancel. With unlimited range there is no underflow, so the remaining
    # zeros come from cancellation.
    unranged = outputs_of(Emulator(rounds=rounds, reference=False, top=False, bottom=False), program, scale)[1:]
    return [
        0.0 if distance([w], [u]) >= 1 else _zero_fraction(u, x)
        for w, u, x in zip(wide, unranged, low[1:], strict=True)
    ]


def distance(wanted: Sequence, got: Sequence) -> float:
    """The Euclidean norm of the difference of two lists of arrays, relative to the norm of the first.

    If the norm of the first is zero, the distance is 1 for any difference, else 0.
    """
    pairs = [(np.asarray(w, np.float64), np.asarray(g, np.float64)) for w, g in zip(wanted, got, strict=True)]
    return ratio(sum(float(np.sum(np.square(g - w))) for w, g in pairs), sum(float(np.sum(w * w)) for w, _ in pairs))


def loss_error(wide, low) -> float:
    """The relative error of the loss `low` against the float32 loss `wide`, both with or both without a loss scale.

    A float32 loss below 1e-30 counts as 1e-30.
    """
    return float(abs(np.float64(low) - np.float64(wide)) / max(abs(np.float64(wide)), 1e-30))


def flushed_fraction(wide, low) -> float:
    """The fraction of a gradient's values that are zero in half precision but not in float32; 0 if it is empty."""
    wide, low = np.asarray(wide), np.asarray(low)
    return float(np.mean((low == 0) & (wide != 0))) if wide.size else 0.0


def _fraction(part: float, whole: float) -> float:
    """Divides `part` by `whole`. If `whole` is zero, the result is 1 for a positive part, else 0."""
    return part / whole if whole > 0 else float(part > 0)


def all_finite(arrays: Sequence) -> bool:
    """True if no array contains inf or nan."""
    return all(bool(np.isfinite(x).all()) for x in map(np.asarray, arrays))


def _zero_fraction(wide, low) -> float:
    """The fraction of the Euclidean norm of `wide` in those values that are zero in `low`."""
    wide, low = np.asarray(wide, np.float64), np.asarray(low, np.float64)
    return ratio(float(np.sum(np.square(wide[low == 0]))), float(np.sum(np.square(wide))))
