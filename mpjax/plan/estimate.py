"""Estimates the memory and the time of training steps on GPUs that need not be present."""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

from mpjax.config.plan import GpuName
from mpjax.errors import UsageError
from mpjax.mesh_axes import TENSOR
from mpjax.plan.communication import Communication, communication_of
from mpjax.plan.compiled import Compiled, PlannedStep, start, with_sources
from mpjax.plan.devices import GPUS
from mpjax.plan.float8 import LayerSavings, layers_of
from mpjax.plan.hlo import parse
from mpjax.plan.measure import Measured
from mpjax.plan.memory import Fit, Memory, largest_batch, other_batch, verified_batch
from mpjax.plan.receipt import Receipt, receipt_of
from mpjax.plan.roofline import Roofline, bounds_of, expected_seconds
from mpjax.plan.target import mesh_of, target_of_gpu
from mpjax.plan.timeline import events_of, overlap_of
from mpjax.plan.traffic import Cost, Traffic, costliest, traffic_of
from mpjax.training.mesh import resolve_sizes


ALIKE = 0.1
"""GPUs whose temporary memory for one batch differs by less than this fraction are taken to be alike.

For a GPU like the first one, the memory of the second batch size is computed from the first GPU's, in proportion to
temporary memory, instead of compiled.
"""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of a step under one policy on one kind of GPU. Numbers are per device unless noted.

    Attributes:
      gpu: the kind of GPU.
      policy: the policy as the user named it.
      xla: further options of XLA, as the user wrote them.
      batch: examples per step, over all devices.
      devices: number of devices that share the batch.
      attention: "cudnn" or "xla"; empty if the model has no attention.
      memory: memory at the peak.
      limit: bytes of the GPU that a run may use.
      traffic: bytes between memory and kernels, and between devices.
      overlap: the fraction of the bytes between devices whose collective has a kernel between its start and its end; 1
        if nothing is exchanged.
      flops: operations of matrix products and convolutions in one step, by dtype of the operands.
      roofline: lower bounds of the time of a step.
      communication: the bytes that devices exchange, and the step time with communication.
      costliest: the kinds of kernels that move the most bytes, the costliest first.
      receipt: the dtypes that the step runs in; None if not requested.
      float8: the savings and costs of float8 in each kind of layer; empty without float8 products.
      fit: the largest batch over all devices; None if not requested, or if memory does not grow with the batch.
      measured: the step timed on the GPU itself; None if the step was not timed.
      tokens: tokens of an example that are predicted or classified; 0 for images.
      recomputes: True if the backward pass computes products again, which `flops` has too.
      mesh: the size of each axis of the mesh.
      sequence: True if positions between layers are divided over `tensor`.
    """

    gpu: GpuName
    policy: str
    batch: int
    devices: int
    attention: str
    memory: Memory
    limit: int
    traffic: Traffic
    overlap: float
    flops: Mapping[str, float]
    roofline: Roofline
    communication: Communication
    xla: str = ""
    costliest: Sequence[Cost] = ()
    receipt: Receipt | None = None
    float8: Sequence[LayerSavings] = ()
    fit: Fit | None = None
    measured: Measured | None = None
    tokens: int = 0
    recomputes: bool = False
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sequence: bool = False

    @property
    def title(self) -> str:
        """The name of the plan in comparisons: the policy and XLA's options, if any."""
        return f"{self.policy} {self.xla}".strip()

    @property
    def fits(self) -> bool:
        """True if the run's own batch needs at most `limit` bytes at the peak."""
        return self.memory.total <= self.limit

    @property
    def items_per_second(self) -> float:
        """The examples per second over all devices, at the lower bound of the step's time (`roofline.seconds`)."""
        return self.batch / self.roofline.seconds

    @property
    def utilisation(self) -> float:
        """The fraction of the data sheet's peak rate that the expected step reaches: MFU, or HFU with recomputation."""
        return self.roofline.compute / self.expected_seconds

    @property
    def expected_seconds(self) -> float:
        """The expected seconds of a step, with the time in which a GPU only waits for communication.

        Without a known network, that time counts as 0.
        """
        expected, timing = self.communication.expected, self.communication.timing
        exposed = expected.exposed if expected else timing.exposed if timing else 0.0
        return expected_seconds(self.roofline, self.traffic.kernels) + exposed

    @property
    def items_per_gpu(self) -> float:
        """Tokens that are predicted, or examples of other data, per second and GPU, in the expected time."""
        return self.batch * (self.tokens or 1) / self.expected_seconds / self.devices


def estimates(
    gpus: Sequence[GpuName],
    steps: Sequence[PlannedStep],
    *,
    devices: int = 1,
    attention: str = "auto",
    most: int = 10,
    receipts: bool = False,
    memory_fraction: float = 0.75,
    fit: bool = True,
    verify: bool = False,
) -> list[Estimate]:
    """Estimates each step on each GPU. The result is grouped by GPU, and in the order of `steps` within a GPU.

    Each step is compiled for each GPU and, if `fit`, with a second batch size, at least for the first GPU. XLA's
    compiler for CUDA is downloaded if it is missing. Nothing is measured.

    Args:
      gpus: the GPUs to plan for.
      steps: training steps that differ only in precision, in XLA's options and in the sizes of their meshes.
      devices: number of GPUs of a kind that share a batch.
      attention: as in `mpjax.plan.compiled.start`.
      most: the number of kinds of kernels to list.
      receipts: whether to compare the dtypes that run with the dtypes asked for.
      memory_fraction: fraction of a GPU's memory that a run may use.
      fit: whether to find the largest batch.
      verify: whether to compile the largest batch too, as in `verified_batch`.

    Raises:
      UsageError: the settings are invalid, XLA cannot compile a step for a GPU, or a step does not use the cuDNN
        attention that was asked for.
    """
    multiple, batch = devices * steps[0].accumulate, steps[0].batch_size
    other = other_batch(batch, multiple)
    for gpu in gpus:
        for step in steps:
            mesh_of(gpu, devices, **step.sizes)  # raises for an unsupported GPU before anything is traced
    # XLA compiles outside Python, so threads run in parallel.
    with with_sources(), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:

        def begin(number: int, gpu: GpuName, size: int) -> "concurrent.futures.Future[Compiled]":
            return start(pool, steps[number].of(size), gpu, devices=devices, attention=attention)

        programs: dict[tuple[GpuName, int], concurrent.futures.Future[Compiled]]
        programs = {(gpu, n): begin(n, gpu, batch) for n in range(len(steps)) for gpu in gpus}
        smaller = {n: begin(n, gpus[0], other) for n in range(len(steps)) if fit}

        def plan(gpu: GpuName, number: int) -> Estimate:
            program = programs[gpu, number].result()
            text = program.executable.as_text()
            hlo = parse(text)
            traffic, events = traffic_of(hlo), events_of(hlo)
            bounds = bounds_of(GPUS[gpu], program.flops, traffic.bytes)
            used, policy = _attention(steps[number], traffic), steps[number].plan.policy
            require_attention(attention, used, gpu=gpu, policy=steps[number].policy)
            return Estimate(
                gpu=gpu,
                policy=steps[number].policy,
                batch=batch,
                devices=devices,
                attention=used,
                memory=program.memory,
                limit=round(GPUS[gpu].memory * memory_fraction),
                traffic=traffic,
                overlap=overlap_of(events),
                flops=program.flops,
                roofline=bounds,
                communication=communication_of(
                    events,
                    GPUS[gpu],
                    bounds.seconds / traffic.bytes,
                    mesh=steps[number].sizes,
                    devices=devices,
                    expected_pace=expected_seconds(bounds, traffic.kernels) / traffic.bytes,
                ),
                xla=steps[number].xla,
                costliest=costliest(text, hlo, most),
                float8=layers_of(program.jaxpr, hlo, GPUS[gpu], policy.compute_dtype) if policy.recipes else (),
                receipt=_receipt(program, text, steps[number], gpu) if receipts else None,
                tokens=steps[number].tokens,
                recomputes=steps[number].recomputes,
                mesh=(sizes := resolve_sizes(steps[number].sizes, devices)),
                sequence=steps[number].sequence and sizes[TENSOR] > 1,
            )

        plans: dict[tuple[GpuName, int], Estimate]
        plans = {(gpu, number): plan(gpu, number) for gpu, number in programs}

        def fitted(gpu: GpuName, number: int) -> Fit | None:
            estimate, first = plans[gpu, number], plans[gpus[0], number]
            unlike = abs(estimate.memory.temporary - first.memory.temporary)
            scaled: set[int] = set()
            if gpu == gpus[0]:
                other_bytes = smaller[number].result().memory.total
            elif estimate.attention == first.attention and unlike < ALIKE * first.memory.temporary:
                # The smaller batch's saving scales with temporary memory: reuse the first GPU's program.
                saved = first.memory.total - smaller[number].result().memory.total
                other_bytes = estimate.memory.total - round(saved * estimate.memory.temporary / first.memory.temporary)
                scaled = {other}
            else:
                other_bytes = begin(number, gpu, other).result().memory.total
            points = {batch: estimate.memory.total, other: other_bytes}
            if estimate.memory.total == other_bytes or (estimate.memory.total > other_bytes) != (batch > other):
                return None  # the batch is so small that workspaces outweigh it
            if not verify:
                return largest_batch(points, estimate.limit, step=multiple, scaled=scaled)
            compiled = functools.partial(begin, number, gpu)
            return verified_batch(
                points,
                estimate.limit,
                lambda size: compiled(size).result().memory.total,
                step=multiple,
                scaled=scaled,
            )

        if fit:
            plans = {key: dataclasses.replace(estimate, fit=fitted(*key)) for key, estimate in plans.items()}
    return [plans[gpu, number] for gpu in gpus for number in range(len(steps))]


def require_attention(requested: str, used: str, *, gpu: str, policy: str) -> None:
    """Raises UsageError if the user chose cuDNN's attention and the compiled step uses XLA's; accepts all other cases.

    Args:
      requested: "auto", "xla" or "cudnn".
      used: "xla", "cudnn", or "" for a model without attention.
      gpu: the planned GPU.
      policy: the policy of the run.
    """
    if requested == "cudnn" and used == "xla":
        raise UsageError(
            f"--attention cudnn: the step of policy {policy} on {gpu} uses XLA's attention, because cuDNN's needs a "
            "half-precision policy, a GPU of compute capability 8.0 or higher, and heads and lengths that it supports; "
            "write --attention auto"
        )


def _receipt(program: Compiled, text: str, step: PlannedStep, gpu: GpuName) -> Receipt:
    return receipt_of(
        program.executable,
        program.jaxpr,
        step.plan.policy,
        target=target_of_gpu(GPUS[gpu]),
        text=text,
        modules={"": step.task.abstract},
        updates=step.plan.least_update,
    )


def _attention(step: PlannedStep, traffic: Traffic) -> str:
    """The attention of a compiled step: "cudnn" if it calls cuDNN's, else "xla"; empty if the model has none."""
    if any("fmha" in target for target in traffic.calls):
        return "cudnn"
    return "xla" if step.attention else ""
