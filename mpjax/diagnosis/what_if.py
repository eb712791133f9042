"""What noise other formats would make of the operands of a step's float8 products."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jax.core import Tracer

from mpjax.diagnosis.arithmetic import widened
from mpjax.diagnosis.block_formats import MXFP8, NVFP4, sqnr_in_blocks
from mpjax.diagnosis.emulate import Emulator, nowhere
from mpjax.diagnosis.formats import FLOAT8
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.program import Program


FORMATS = (MXFP8, NVFP4)


def noise_in_blocks(program: Program) -> dict[str, dict[str, float]]:
    """Returns the signal to quantisation noise that block formats would have, in decibels, by module path and format.

    Of the operands of a module's products, forward and backward, it is that of the one with most noise. Blocks lie
    along the axis that is added up. Products in a loop are left out: their operands are not known before it runs.

    Args:
      program: a step with products in float8; the operands are looked at without rounding.
    """
    heard: dict[str, dict[str, float]] = {}
    Listening(heard=heard).run(*program.at(1.0))
    return heard


@dataclasses.dataclass(frozen=True)
class Listening(Emulator):
    """An emulator without rounding that looks at the operands of products in float8.

    Attributes:
      heard: by module path and name of a format, the decibels of the noisiest operand; filled by a run.
    """

    rounds: Callable[[str], bool] = nowhere
    reference: bool = False
    heard: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Returns the results of an equation, after a look at its operands if it is a product in float8."""
        if eqn.primitive.name == "dot_general" and any(var.aval.dtype in FLOAT8 for var in eqn.invars):
            for pair, axes in zip(pairs, eqn.params["dimension_numbers"][0], strict=True):
                if not isinstance(pair.low, Tracer):
                    self._listen(place.path, np.asarray(widened(pair.low)), tuple(axes))
        return super().applied(eqn, pairs, place, debug_info)

    def _listen(self, path: str, values: np.ndarray, axes: tuple[int, ...]) -> None:
        last = tuple(range(values.ndim - len(axes), values.ndim))
        rows = np.moveaxis(values, axes, last).reshape(*np.delete(values.shape, axes), -1)
        found = self.heard.setdefault(path, {})
        for each in FORMATS:
            found[str(each)] = min(found.get(str(each), 200.0), sqnr_in_blocks(rows, each))
