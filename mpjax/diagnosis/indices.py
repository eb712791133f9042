"""Finds an index out of range, such as a label of no class, for which JAX reads NaN."""

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
    """An emulator without rounding that records the indices for which gathers read NaN.

    Attributes:
      found: the first index out of range and the size of its axis, for each axis of each gather that reads NaN.
    """

    rounds: Callable[[str], bool] = nowhere
    reference: bool = False
    found: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Computes the results of an equation, and checks the indices of a gather that is not finite, unlike its rows.

        Gathers in loops are not checked. Gathers that clip indices, or that fill in a number, stay finite.
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
                self.found.extend((int(index), size) for index in beyond[:1])
        return outputs


def out_of_range(program: Program, scale: float) -> tuple[int, int] | None:
    """The first index out of range for which a gather reads NaN, and the size of the axis that it indexes; else None.

    Args:
      program: the step, which runs without rounding.
      scale: the loss scale.
    """
    emulator = Indices()
    emulator.run(*program.at(scale))
    return next(iter(emulator.found), None)
