"""What a step takes of a device's memory, by what it is for."""

import dataclasses
from typing import Any

import jax

from mpjax.plan.step import Step


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device at a step's peak.

    Attributes:
      parameters: of the model.
      optimizer: of the optimizer's state, master weights among it.
      statistics: batch statistics and the moving average of the parameters.
      batch: what the step is given to learn from.
      temporary: what is kept while the step runs: activations above all.
      extra: results that take no argument's place: metrics, and a second copy of the state if it were not donated.
    """

    parameters: int
    optimizer: int
    statistics: int
    batch: int
    temporary: int
    extra: int

    @property
    def total(self) -> int:
        """Of all."""
        return sum(dataclasses.astuple(self))


def memory_of(step: Step, found: Any, devices: int) -> Memory:
    """What XLA has laid out for one device.

    Args:
      step: what was compiled.
      found: `compiled.memory_analysis()`.
      devices: that share the batch; each has the whole state.
    """
    state = step.state
    return Memory(
        parameters=_bytes(state.params),
        optimizer=_bytes(state.opt_state) + _bytes(state.step),
        statistics=_bytes(state.stats) + _bytes(state.ema),
        batch=_bytes(dict(step.batch)) // devices,
        temporary=found.temp_size_in_bytes,
        extra=found.output_size_in_bytes - found.alias_size_in_bytes,
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
