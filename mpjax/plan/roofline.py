"""How fast a step can be at best: the time its arithmetic takes, or the time its traffic takes, whichever is longer.

The roofline of Williams, Waterman and Patterson, 2009 (https://doi.org/10.1145/1498765.1498785).
"""

import dataclasses
from collections.abc import Mapping

from mpjax.plan.devices import Gpu


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Bounds of a step's time on one GPU, in seconds.

    Attributes:
      compute: of its matrix products and convolutions at the peak rate of their dtypes.
      traffic: of its bytes at the memory's full bandwidth.
    """

    compute: float
    traffic: float

    @property
    def seconds(self) -> float:
        """At best: arithmetic and traffic at the same time."""
        return max(self.compute, self.traffic)

    @property
    def serial(self) -> float:
        """At full rates, but one after the other, as where no kernel does both at once."""
        return self.compute + self.traffic

    @property
    def bound(self) -> str:
        """What the time at best is that of: `compute` or `traffic`."""
        return "compute" if self.compute > self.traffic else "traffic"


def roofline(gpu: Gpu, flops: Mapping[str, float], moved: float) -> Roofline:
    """The bounds of a step.

    Args:
      gpu: where it runs.
      flops: its operations by dtype of the operands, on one device.
      moved: bytes that its kernels read and write, on one device.
    """
    return Roofline(sum(count / gpu.rate(dtype) for dtype, count in flops.items()), moved / gpu.bandwidth)
