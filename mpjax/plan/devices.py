"""The memory, bandwidth and arithmetic rates of each GPU that a plan supports.

Rates are NVIDIA's data sheet rates without sparsity, for the SXM form if there are several. A GPU under load is slower.
Memory is the size that CUDA reports to a program, which is less than the data sheet's.

Links are of NVIDIA's own systems with eight GPUs; other hosts may have fewer network adapters. Data sheets give NVLink
and PCIe in both directions together, and networks in bits/s. The table has bytes/s in one direction.
"""

import dataclasses
from collections.abc import Mapping

from mpjax.config.plan import GpuName


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU.

    Attributes:
      name: the name that NVIDIA's driver reports. Other forms, such as PCIe cards, have other names and rates.
      capability: compute capability, major and minor.
      multiprocessors: number of streaming multiprocessors.
      lanes: float32 units per multiprocessor.
      threads: maximum resident threads per multiprocessor.
      clock: maximum clock of a multiprocessor, Hz.
      memory: bytes that CUDA reports.
      bandwidth: memory bandwidth, bytes/s.
      l2: bytes of L2 cache.
      shared: bytes of shared memory per multiprocessor.
      shared_per_block: maximum bytes of shared memory per block.
      flops: peak operations per second of matrix products and convolutions, by dtype of the operands. A multiplication
        and an addition are two operations. "tensorfloat32" is float32 with inputs rounded to 10 bits of mantissa, XLA's
        default for float32 on GPUs that support it. "float8" is all float8 formats.
      link: bandwidth from one GPU to the others of its host, bytes/s in one direction.
      network: the bandwidth from a host to other hosts, divided by the GPUs of the host, bytes/s in one direction. None
        if NVIDIA has no host with this GPU.
      source: the data sheet of the rates.
      links: the data sheet of the links.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    threads: int = 2048
    clock: float
    memory: int
    bandwidth: float
    l2: int
    shared: int
    shared_per_block: int
    flops: Mapping[str, float]
    link: float
    network: float | None
    source: str
    links: str

    def rate(self, dtype: str) -> float:
        """The peak operations per second of products with operands of a dtype; any float8 dtype has one rate.

        It is float32's rate if the GPU has no units for the dtype.
        """
        return self.flops.get("float8" if dtype.startswith("float8") else dtype, self.flops["float32"])


HOST = 8
"""The number of GPUs in a host."""

_KIB = 1024
_TERA = 1e12


def _flops(**tera: float) -> Mapping[str, float]:
    return {dtype: rate * _TERA for dtype, rate in tera.items()}


GPUS: Mapping[GpuName, Gpu] = {
    "v100": Gpu(
        name="Tesla V100-SXM2-16GB",
        capability=(7, 0),
        multiprocessors=80,
        lanes=64,
        clock=1.53e9,
        memory=16_935_682_048,
        bandwidth=900e9,
        l2=6 * _KIB**2,
        shared=96 * _KIB,
        shared_per_block=96 * _KIB,
        flops=_flops(float64=7.8, float32=15.7, float16=125),
        link=150e9,
        network=6.25e9,
        source="NVIDIA V100 data sheet, January 2020 (SXM2)",
        links="NVIDIA V100 data sheet (NVLink 300 GB/s) and DGX-1 data sheet (4 x 100 Gb/s InfiniBand)",
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        multiprocessors=108,
        lanes=64,
        clock=1.41e9,
        memory=85_100_068_864,
        bandwidth=2039e9,
        l2=40 * _KIB**2,
        shared=164 * _KIB,
        shared_per_block=163 * _KIB,
        flops=_flops(float64=19.5, float32=19.5, tensorfloat32=156, bfloat16=312, float16=312),
        link=300e9,
        network=25e9,
        source="NVIDIA A100 80GB data sheet, June 2021 (SXM4)",
        links="NVIDIA A100 data sheet (NVLink 600 GB/s) and DGX A100 data sheet (8 x 200 Gb/s InfiniBand for compute)",
    ),
    "l4": Gpu(
        name="NVIDIA L4",
        capability=(8, 9),
        multiprocessors=58,
        lanes=128,
        threads=1536,
        clock=2.04e9,
        memory=23_800_000_000,
        bandwidth=300e9,
        l2=48 * _KIB**2,
        shared=100 * _KIB,
        shared_per_block=99 * _KIB,
        flops=_flops(float64=0.47, float32=30.3, tensorfloat32=60, bfloat16=121, float16=121, float8=242.5),
        link=32e9,
        network=None,
        source="NVIDIA L4 data sheet, 2023, where tensor core rates are given with sparsity: half of them",
        links="NVIDIA L4 data sheet (PCIe Gen4 x16, 64 GB/s), as if no two GPUs shared a switch; no NVLink",
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        multiprocessors=132,
        lanes=128,
        clock=1.98e9,
        memory=84_942_979_072,
        bandwidth=3350e9,
        l2=50 * _KIB**2,
        shared=228 * _KIB,
        shared_per_block=227 * _KIB,
        flops=_flops(float64=67, float32=67, tensorfloat32=494.5, bfloat16=989.5, float16=989.5, float8=1979),
        link=450e9,
        network=50e9,
        source="NVIDIA H100 data sheet (SXM5), where tensor core rates are given with sparsity: half of them",
        links="NVIDIA H100 data sheet (NVLink 900 GB/s) and DGX H100 data sheet (8 x 400 Gb/s ConnectX-7)",
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        capability=(9, 0),
        multiprocessors=132,
        lanes=128,
        clock=1.98e9,
        memory=150_110_011_392,
        bandwidth=4800e9,
        l2=50 * _KIB**2,
        shared=228 * _KIB,
        shared_per_block=227 * _KIB,
        flops=_flops(float64=67, float32=67, tensorfloat32=494.5, bfloat16=989.5, float16=989.5, float8=1979),
        link=450e9,
        network=50e9,
        source="NVIDIA H200 data sheet (SXM), where tensor core rates are given with sparsity: half of them",
        links="NVIDIA H200 data sheet (NVLink 900 GB/s) and DGX H200 data sheet (8 x 400 Gb/s ConnectX-7)",
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=(10, 0),
        multiprocessors=148,
        lanes=128,
        clock=1.965e9,
        memory=191_514_411_008,
        bandwidth=8000e9,
        l2=126 * _KIB**2,
        shared=228 * _KIB,
        shared_per_block=227 * _KIB,
        flops=_flops(float64=37, float32=75, tensorfloat32=1125, bfloat16=2250, float16=2250, float8=4500),
        link=900e9,
        network=50e9,
        source="NVIDIA DGX B200 and HGX B200 data sheets, an eighth of the system's, half where with sparsity",
        links="NVIDIA DGX B200 data sheet (NVLink 14.4 TB/s for 8 GPUs; 8 x 400 Gb/s ConnectX-7)",
    ),
}
