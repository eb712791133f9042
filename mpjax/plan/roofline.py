"""Bounds the time of a step on a GPU, and predicts the time to expect.

The best-case time is the longer of the arithmetic time and the traffic time: the roofline model of Williams, Waterman
and Patterson, 2009 (https://doi.org/10.1145/1498765.1498785). No program comes near it: kernels run one after the
other, each below the data sheet's rates.
"""

import dataclasses
from collections.abc import Mapping

from mpjax.plan.devices import Gpu


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds of a step's time on one GPU, in seconds.

    Attributes:
      compute: time of the matrix products and convolutions at the peak rates of their dtypes.
      traffic: time to move the step's bytes at full memory bandwidth.
    """

    compute: float
    traffic: float

    @property
    def seconds(self) -> float:
        """The best-case time, the longer of the two: arithmetic and traffic overlap completely."""
        return max(self.compute, self.traffic)

    @property
    def serial(self) -> float:
        """The sum of the two times: no kernel does arithmetic and traffic at once."""
        return self.compute + self.traffic

    @property
    def bound(self) -> str:
        """The name of the longer of the two times: "compute" or "traffic", which also stands for equal times."""
        return "compute" if self.compute > self.traffic else "traffic"


def bounds_of(gpu: Gpu, flops: Mapping[str, float], moved: float) -> Roofline:
    """Computes the roofline of a step on one device.

    Args:
      gpu: the GPU.
      flops: operations by dtype of the operands, on one device.
      moved: bytes that the kernels read and write, on one device.
    """
    return Roofline(sum(count / gpu.rate(dtype) for dtype, count in flops.items()), moved / gpu.bandwidth)


PRODUCTS = 790 / 990
"""Share of the data sheet's rate that large products reach: bfloat16, measured on an H200."""

COPIES = 4.3 / 4.8
"""Share of the data sheet's bandwidth that large copies reach, measured on an H200."""

LAUNCH = 2e-6
"""Seconds from one kernel to the next."""

REACHED = 0.89
"""Share of these rates that steps reach: the median of three of mpjax's own, measured on an H200.

ResNet-50 took 34.0 ms where 30.1 were predicted at these rates: 0.89. ViT-B/16 reached 0.84, and GPT-2 small 0.94
(docs/measured.md). Published runs of ResNet-50 reach less on older GPUs: on an A100, NVIDIA's DeepLearningExamples
(PyTorch, AMP, 21.03, 2,470 images/s) 0.74 and timm (2,600) 0.78, and on a V100 Flax's ImageNet example (1,034) 0.72.
"""


def expected_seconds(bounds: Roofline, kernels: int) -> float:
    """Predicts the seconds of a step on one GPU, without communication, from its bounds and measured rates.

    Arithmetic, traffic and launches are added, at the rates that single large kernels reach. The sum is divided by the
    fraction of these rates that whole steps reach (`REACHED`).

    Args:
      bounds: the roofline of the step.
      kernels: the number of its kernels.
    """
    return (bounds.compute / PRODUCTS + bounds.traffic / COPIES + kernels * LAUNCH) / REACHED
