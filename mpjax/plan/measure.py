"""Times a step on this machine's GPU, for comparison with its plan."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mpjax.config.plan import GpuName
from mpjax.data.fields import Fields, Image, Length, Numbers, Tokens, batch_shapes
from mpjax.plan.compiled import PlannedStep
from mpjax.plan.devices import GPUS
from mpjax.training.escaped import trace
from mpjax.training.mesh import make_mesh, put_on_devices
from mpjax.training.setup import initial_state


WARM_UP = 5
REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of a step on a device.

    Attributes:
      seconds: median time of a step, in seconds.
      quartiles: first and third quartile of the time, in seconds.
      peak: peak bytes in use on the first device, as it reports them. None if it reports nothing, or if an earlier
        program of this process used at least as much, because a device keeps one maximum for the life of the process.
      device: the driver's name of the device.
    """

    seconds: float
    quartiles: tuple[float, float]
    peak: int | None
    device: str


def is_here(name: GpuName, devices: int = 1) -> bool:
    """True if JAX has exactly `devices` devices, all with the driver's name of the GPU `name`, such as "h100"."""
    return [device.device_kind for device in jax.devices()] == [GPUS[name].name] * devices


def measure_step(step: PlannedStep, fields: Fields, *, seed: int = 0, ema: bool = False) -> Measured:
    """Compiles a step and runs it many times on all devices of JAX; measures its time and peak memory.

    All runs use one random batch, which stays on the devices. Fields of the step's batch that are not in `fields` are
    zeros.

    Args:
      step: the planned step.
      fields: the fields of its batches.
      seed: the seed of parameters and examples.
      ema: whether the state holds a moving average of the parameters.
    """
    mesh = make_mesh(**step.sizes)
    device = mesh.devices.flat[0]
    before = peak_of(device) or 0
    with step.x64_if_float64():
        layout, packing, train_step = step.build_on(mesh)
        sharding = layout.batch(size=step.batch_size, accumulate=step.accumulate)
        blank = {name: np.zeros(x.shape, x.dtype) for name, x in step.batch.items() if name not in fields}
        batch = put_on_devices({**random_batch(fields, step.batch_size, seed), **blank}, sharding)
        state = initial_state(step.task, step.tx, seed=seed, ema=ema, layout=layout)
        state = packing.pack(state)
        lowered = trace(train_step, state, batch).lower()
        compiled = lowered.compile(compiler_options=step.compiler_options(mesh))
        times = times_of(lambda state: compiled(state, batch)[0], state)
    low, middle, high = statistics.quantiles(times, n=4)
    peak = peak_of(device)
    return Measured(middle, (low, high), peak if peak and peak > before else None, device.device_kind)


def peak_of(device: Any) -> int | None:
    """The most bytes that were in use at once on a device since the process started; None if it reports none."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def times_of(
    step: Callable[[Any], Any],
    state: Any,
    *,
    warm_up: int = WARM_UP,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Times each of `repeats` steps in seconds, after `warm_up` steps that are not timed.

    `step` maps a state to the next state, and each call takes the result of the last. Its time ends when the result is
    ready.
    """
    times = []
    for index in range(warm_up + repeats):
        start = clock()
        state = jax.block_until_ready(step(state))
        if index >= warm_up:
            times.append(clock() - start)
    return times


def random_batch(fields: Fields, size: int, seed: int) -> Mapping[str, np.ndarray]:
    """Draws a batch of `size` examples, as NumPy arrays by field, with uniformly random values that the fields allow.

    Floating-point values are in [0, 1), integers of images in [0, 256), labels and masks below the number of classes,
    tokens below the vocabulary size, and integers of `Numbers` 0 or 1. Every length is the largest.
    """
    rng = np.random.default_rng(seed)
    shapes = batch_shapes(fields, size)

    def of(field: Any, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if isinstance(field, Length):
            return np.full(like.shape, field.largest, like.dtype)
        if np.issubdtype(like.dtype, np.floating):
            return rng.random(like.shape).astype(like.dtype)
        if isinstance(field, Image):
            most = 256
        elif isinstance(field, Numbers):
            most = 2
        else:
            most = field.vocabulary if isinstance(field, Tokens) else field.num_classes
        return rng.integers(most, size=like.shape, dtype=like.dtype)

    return {name: of(field, shapes[name]) for name, field in fields.items()}
