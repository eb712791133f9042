"""How large the terms are that a value is the sum of: what its error is to be held against where they cancel."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.arithmetic import results_of, widened
from mpjax.diagnosis.emulate import Emulator, everywhere, nowhere
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import ratio
from mpjax.precision.dtypes import is_floating


@dataclasses.dataclass(frozen=True)
class Terms(Emulator):
    """Runs a program without rounding; `wide` of a result is not its value but the magnitude of its terms, added up.

    The terms of a single number that is a sum, a difference or a mean are those of what is added, however they cancel.
    Every other result is one term: what cancels element by element, as in a layer, is a fault of its own.
    """

    rounds: Callable[[str], bool] = nowhere

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """The results of an operation."""
        floating = [is_floating(atom.aval) for atom in eqn.invars]
        terms = [jnp.abs(widened(p.wide)) if f else p.low for p, f in zip(pairs, floating, strict=True)]
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


_ADDS = frozenset(
    {
        *("add", "add_any", "reduce_sum", "neg", "div", "convert_element_type", "copy"),
        *("reshape", "squeeze", "broadcast_in_dim"),
    }
)
"""What a sum may go through. The terms are magnitudes: of `neg` their sign is of no interest."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """The float32 step, and how well its loss and its gradients are determined.

    Attributes:
      program: the step in half precision, with float32's constants; float32's own where that is not the same.
      outputs: float32's loss and gradients, at a loss scale of 1.
      tolerance: as of `mpjax.diagnose`.
    """

    program: Program
    outputs: Sequence[np.ndarray]
    tolerance: float

    def has_loss(self, low: Sequence, scale: float) -> bool:
        """Whether a finite step's loss is near, or off in a way that its gradients show to be harmless.

        Args:
          low: its scaled outputs.
          scale: its loss scale.
        """
        error = loss_error(self.outputs[0], low[0] / scale)
        return error <= self.tolerance or (self.loss_is_small(low, scale) and self.has_gradients(low, scale))

    def loss_is_small(self, low: Sequence, scale: float) -> bool:
        """Whether the terms of a loss cancel, or float32 does not determine it either."""
        return self.terms_cancel(low, scale) or not self.determined(slice(1))

    def terms_cancel(self, low: Sequence, scale: float) -> bool:
        """Whether a loss, and its error, are little of the terms that cancel in it."""
        loss = float(self.outputs[0])
        return max(abs(loss), abs(float(low[0]) / scale - loss)) <= self.tolerance * self.terms

    def has_gradients(self, low: Sequence, scale: float) -> bool:
        """Whether gradients, scaled, are near, or not determined by float32 either."""
        return self.gradient_error(low, scale) <= 0.5 or not self.determined(slice(1, None))

    def determined(self, part: slice) -> bool:
        """Whether outputs stay near where the inputs change in float32's last bits."""
        return distance(self.outputs[part], self._nudged[part]) <= self.tolerance

    def gradient_error(self, low: Sequence, scale: float) -> float:
        """The relative error of all gradients together, in the Euclidean norm."""
        return distance(self.outputs[1:], [x / scale for x in low[1:]])

    @functools.cached_property
    def terms(self) -> float:
        """The sum of the magnitudes of the terms that the loss is the sum of."""
        return float(Terms().run(*self.program.at(1.0))[0].wide)

    @functools.cached_property
    def _nudged(self) -> list[np.ndarray]:
        """The outputs for parameters and a batch changed by 2^-22 of their values, two of float32's last bits."""
        keys = iter(jax.random.split(jax.random.key(0), len(self.program.inputs)))
        inputs = [_nudged(x, next(keys)) if is_floating(x) else x for x in self.program.inputs]
        return outputs_of(WITHOUT_ROUNDING, self.program._replace(inputs=inputs), 1.0)


def _nudged(values: jax.Array, key: jax.Array) -> jax.Array:
    signs = jax.random.rademacher(key, values.shape, jnp.float32)
    return values.astype(jnp.float32) * (1 + signs * np.float32(2**-22))


ROUNDING = Emulator(reference=False)
WITHOUT_ROUNDING = Emulator(rounds=nowhere, reference=False)


def is_repaired(
    reference: Reference, program: Program, scale: float, rounds: Callable[[str], bool] = everywhere
) -> bool:
    """Whether a step, rounding where it `rounds`, is finite, its loss near the reference's, no gradient lost to zero.

    Args:
      reference: what it is held against.
      program: the step.
      scale: the loss scale.
      rounds: as of `Emulator`.
    """
    low = outputs_of(Emulator(rounds=rounds, reference=False), program, scale)
    if not all_finite(low) or not reference.has_loss(low, scale):
        return False
    return max(lost_shares(reference, program, scale, low, rounds), default=0.0) <= reference.tolerance


def outputs_of(emulator: Emulator, program: Program, scale: float) -> list[np.ndarray]:
    """Scaled loss and scaled gradients, as an emulator without a reference gives them."""
    return jax.device_get([pair.low for pair in emulator.run(*program.at(scale))])


def lost_shares(
    reference: Reference, program: Program, scale: float, low: Sequence, rounds: Callable = everywhere
) -> list[float]:
    """Of each gradient's norm, what rounding to zero took; arguments as of `is_repaired`, `low` scaled outputs."""
    wide = [np.asarray(x, np.float64) * scale for x in reference.outputs[1:]]
    lost = [_zero_share(w, x) for w, x in zip(wide, low[1:], strict=True)]
    if max(lost, default=0.0) <= reference.tolerance:
        return lost
    # Zero for want of range, or of bits? Without a smallest number only bits are wanting.
    unranged = outputs_of(Emulator(rounds=rounds, reference=False, ranged=False), program, scale)[1:]
    return [
        0.0 if distance([w], [u]) >= 1 else _zero_share(u, x) for w, u, x in zip(wide, unranged, low[1:], strict=True)
    ]


def distance(wanted: Sequence, got: Sequence) -> float:
    """The Euclidean norm of a difference of lists of arrays, as a share of the norm of the first."""
    pairs = [(np.asarray(w, np.float64), np.asarray(g, np.float64)) for w, g in zip(wanted, got, strict=True)]
    return ratio(sum(float(np.sum(np.square(g - w))) for w, g in pairs), sum(float(np.sum(w * w)) for w, _ in pairs))


def loss_error(wide, low) -> float:
    """Relative error of a loss."""
    return float(abs(np.float64(low) - np.float64(wide)) / max(abs(np.float64(wide)), 1e-30))


def flushed_share(wide, low) -> float:
    """The share of a gradient's values that are zero in half precision and not in the reference."""
    wide, low = np.asarray(wide), np.asarray(low)
    return float(np.mean((low == 0) & (wide != 0))) if wide.size else 0.0


def all_finite(arrays: Sequence) -> bool:
    """Whether there is neither inf nor nan in arrays."""
    return all(bool(np.isfinite(x).all()) for x in map(np.asarray, arrays))


def _zero_share(wide, low) -> float:
    wide, low = np.asarray(wide, np.float64), np.asarray(low, np.float64)
    return ratio(float(np.sum(np.square(wide[low == 0]))), float(np.sum(np.square(wide))))
