"""Finds an index out of range, such as a label of no class, for which JAX reads NaN."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jax.core import Tracer

from mpjax.diagnosis.emulate import Emulator, nowhere
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.program import Program


@dataclasses.dataclass(frozen=True)
class Indices(Emulator):
    """An emulator without rounding that records the out-of-range indices of gathers, with the number of rows."""

    rounds: Callable[[str], bool] = nowhere
    reference: bool = False
    found: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Checks the indices of a gather outside of loops, and computes the results of an equation."""
        if eqn.primitive.name == "gather" and not isinstance(pairs[1].low, Tracer):
            axes, shape = eqn.params["dimension_numbers"].start_index_map, eqn.invars[0].aval.shape
            indices = np.asarray(pairs[1].low).reshape(-1, len(axes))
            for axis, column in zip(axes, indices.T, strict=True):
                size, slice_size = shape[axis], eqn.params["slice_sizes"][axis]
                beyond = column[(column < 0) | (column > size - slice_size)]
                self.found.extend((int(index), size) for index in beyond[:1])
        return super().applied(eqn, pairs, place, debug_info)


def out_of_range(program: Program, scale: float) -> tuple[int, int] | None:
    """The first index out of range in a gather of the step, and the size of the axis that it indexes; None if none is.

    Gathers in loops are not checked.

    Args:
      program: the step, which runs without rounding.
      scale: the loss scale.
    """
    emulator = Indices()
    emulator.run(*program.at(scale))
    return next(iter(emulator.found), None)
