"""Finds an index out of range, such as a label that is no class, for which a gather in JAX returns NaN."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jax.core import Tracer

from mpjax.diagnosis.emulate import Emulator, nowhere
from mpjax.diagnosis.health import all_finite
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.program import Program


@dataclasses.dataclass(frozen=True)
class Indices(Emulator):
    """An emulator without rounding that records the indices for which gathers return NaN.

    Attributes:
      out_of_range: `(index, size of its axis)` for each axis of each gather that returns NaN; of each axis only the
        first index out of range. A run fills it.
    """

    rounds: Callable[[str], bool] = nowhere
    reference: bool = False
    out_of_range: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Computes the results of an equation, and checks the indices of a gather that makes NaN of a finite array.

        Gathers in loops are not checked. Gathers that clip their indices, or fill in a number, stay finite.
        """
        if eqn.primitive.name != "gather" or any(isinstance(pair.low, Tracer) for pair in pairs):
            return super().applied(eqn, pairs, place, debug_info)
        rows, indices = (np.asarray(pair.low) for pair in pairs)
        outputs = super().applied(eqn, pairs, place, debug_info)
        if all_finite([rows]) and not all_finite([outputs[0].low]):
            axes, shape = eqn.params["dimension_numbers"].start_index_map, eqn.invars[0].aval.shape
            for axis, column in zip(axes, indices.reshape(-1, len(axes)).T, strict=True):
                size, slice_size = shape[axis], eqn.params["slice_sizes"][axis]
                beyond = column[(column < 0) | (column > size - slice_size)]
                self.out_of_range.extend((int(index), size) for index in beyond[:1])
        return outputs


def out_of_range(program: Program, scale: float) -> tuple[int, int] | None:
    """The first index out of range for which a gather returns NaN, and the size of the axis; None if there is none.

    Args:
      program: the step, which runs without rounding.
      scale: the loss scale.
    """
    emulator = Indices()
    emulator.run(*program.at(scale))
    return next(iter(emulator.out_of_range), None)
