"""How large the terms are that a value is the sum of: what its error is to be held against where they cancel."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.arithmetic import results_of, widened
from mpjax.diagnosis.emulate import Emulator, Pair, Place, nowhere
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
