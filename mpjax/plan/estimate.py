"""How fast a step can be at best: the time its arithmetic takes, or the time its traffic takes, whichever is longer.

The roofline of Williams, Waterman and Patterson, 2009 (https://doi.org/10.1145/1498765.1498785).
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

from mpjax.config import Config
from mpjax.config.commands import GpuName
from mpjax.data import Fields
from mpjax.plan.compiled import Compiled, start
from mpjax.plan.devices import GPUS, Gpu
from mpjax.plan.hlo import parse
from mpjax.plan.measure import Measured
from mpjax.plan.memory import Fit, Memory, largest_batch, other_batch, verified_batch
from mpjax.plan.step import Step, planned_step
from mpjax.plan.target import mesh_of
from mpjax.plan.traffic import Traffic, traffic_of


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


ALIKE = 0.1
"""GPUs whose temporary memory for one batch differs by less than this share are taken to have proportional lines."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A run's step under one policy on one kind of GPU; numbers are of one device.

    Attributes:
      gpu: which kind.
      policy: as it was asked for.
      batch: examples per step, over all devices.
      devices: that share it.
      attention: "cudnn" or "xla"; empty: the model has none.
      memory: at the peak.
      limit: bytes that a run may use.
      traffic: between memory and kernels, and between devices.
      flops: operations by dtype.
      roofline: the time at best.
      fit: the largest batch; None if it was not asked for, or memory does not grow with the batch.
      measured: the same step on the GPU itself; None if there was none.
    """

    gpu: GpuName
    policy: str
    batch: int
    devices: int
    attention: str
    memory: Memory
    limit: int
    traffic: Traffic
    flops: Mapping[str, float]
    roofline: Roofline
    fit: Fit | None = None
    measured: Measured | None = None

    @property
    def fits(self) -> bool:
        """Whether the run's own batch does."""
        return self.memory.total <= self.limit

    @property
    def items_per_second(self) -> float:
        """Examples at best, of all devices."""
        return self.batch / self.roofline.seconds


def estimates(
    gpus: Sequence[GpuName],
    runs: Sequence[Config],
    fields: Fields,
    *,
    devices: int = 1,
    attention: str = "auto",
    memory_fraction: float = 0.75,
    fit: bool = True,
    verify: bool = False,
) -> list[Estimate]:
    """A plan of each run on each GPU, the runs of one GPU after one another.

    Args:
      gpus: for which to plan.
      runs: that differ in precision only.
      fields: of their batches.
      devices: that share a batch.
      attention: as in `mpjax.plan.compiled.start`.
      memory_fraction: share of a GPU's memory that a run may use.
      fit: whether to look for the largest batch.
      verify: whether to compile it too.

    Raises:
      UsageError: settings that cannot be, or XLA cannot compile a step for a GPU.
    """
    multiple, batch = devices * runs[0].training.accumulate, runs[0].data.batch_size
    other = other_batch(batch, multiple)
    for gpu in gpus:
        mesh_of(gpu, devices)  # one that XLA does not take is refused before anything is traced
    # Threads, since XLA compiles outside Python.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        steps = [planned_step(run, fields) for run in runs]

        def begin(number: int, gpu: GpuName, size: int) -> "concurrent.futures.Future[Compiled]":
            return start(pool, steps[number].of(size), gpu, devices=devices, attention=attention)

        programs: dict[tuple[GpuName, int], concurrent.futures.Future[Compiled]]
        programs = {(gpu, n): begin(n, gpu, batch) for n in range(len(runs)) for gpu in gpus}
        smaller = {n: begin(n, gpus[0], other) for n in range(len(runs)) if fit}

        def plan(gpu: GpuName, number: int) -> Estimate:
            program = programs[gpu, number].result()
            traffic = traffic_of(parse(program.executable.as_text()))
            return Estimate(
                gpu=gpu,
                policy=runs[number].precision.policy,
                batch=batch,
                devices=devices,
                attention=_attention(steps[number], traffic),
                memory=program.memory,
                limit=round(GPUS[gpu].memory * memory_fraction),
                traffic=traffic,
                flops=program.flops,
                roofline=roofline(GPUS[gpu], program.flops, traffic.bytes),
            )

        found: dict[tuple[GpuName, int], Estimate]
        found = {(gpu, number): plan(gpu, number) for gpu, number in programs}

        def fitted(gpu: GpuName, number: int) -> Fit | None:
            own, first = found[gpu, number], found[gpus[0], number]
            ratio = own.memory.temporary / first.memory.temporary
            if own.attention == first.attention and abs(ratio - 1) < ALIKE:
                # What a smaller batch saves is in proportion to what the batch takes: one program serves all GPUs.
                saved = first.memory.total - smaller[number].result().memory.total
                other_bytes = own.memory.total - round(saved * ratio)
            else:
                other_bytes = begin(number, gpu, other).result().memory.total
            points = {batch: own.memory.total, other: other_bytes}
            if own.memory.total == other_bytes or (own.memory.total > other_bytes) != (batch > other):
                return None  # so little that workspaces outweigh the batch
            if not verify:
                return largest_batch(points, own.limit, step=multiple)
            compiled = functools.partial(begin, number, gpu)
            return verified_batch(points, own.limit, lambda size: compiled(size).result().memory.total, step=multiple)

        if fit:
            found = {key: dataclasses.replace(own, fit=fitted(*key)) for key, own in found.items()}
    return [found[gpu, number] for gpu in gpus for number in range(len(runs))]


def _attention(step: Step, traffic: Traffic) -> str:
    """What was made of the model's attention."""
    if any("fmha" in target for target in traffic.calls):
        return "cudnn"
    return "xla" if step.attention else ""
