"""Predicts the time of a step to expect on several GPUs, between its bounds, and its efficiency against one host."""

import dataclasses
from collections.abc import Mapping, Sequence

from mpjax.plan.devices import HOST, Gpu
from mpjax.plan.links import Reach, duration_of, latency_of
from mpjax.plan.timeline import Event, Start, exposed_in_any_case, simulate


@dataclasses.dataclass(frozen=True)
class Expected:
    """The time of a step to expect, with kernels at measured rates, and exchanges with their latency.

    Attributes:
      step: seconds, with exchanges beside kernels as in XLA's order of execution.
      communication: the sum of the times of all exchanges.
      exposed: the part in which the device waits for an exchange and computes nothing.
      none_hidden: seconds if no exchange ran beside kernels.
      all_hidden: seconds if every exchange that has a kernel between its start and its end ran beside kernels.
      one_host: seconds if groups of devices were never larger than a host, so that nothing crossed the network.
      efficiency: `one_host / step`.
      by_axes: the seconds of exchanges by the axes of the mesh, as in `{"fsdp": 0.1}`.
    """

    step: float
    communication: float
    exposed: float
    none_hidden: float
    all_hidden: float
    one_host: float
    efficiency: float
    by_axes: Mapping[str, float]


def expected_of(
    events: Sequence[Event], gpu: Gpu, pace: float, reaches: Mapping[str, Reach], labels: Mapping[str, str]
) -> Expected | None:
    """Predicts the time to expect of a program, or returns None if a group spans hosts and their network is unknown.

    An exchange takes its time at the full rates of the links (`duration_of`) and its latency (`latency_of`).

    Args:
      events: the events of the program.
      gpu: the GPU.
      pace: the seconds to expect per byte that kernels read or write.
      reaches: how the devices of each collective are distributed over hosts, by the name of its `Start`.
      labels: the axes of the mesh along which each collective exchanges, by the name of its `Start`.
    """

    def seconds(start: Start, reach: Reach) -> float | None:
        duration = duration_of(start.kind, start.bytes, reach, gpu)
        return None if duration is None else duration + latency_of(start.kind, reach)

    starts = [event for event in events if isinstance(event, Start)]
    durations = {start.name: seconds(start, reaches[start.name]) for start in starts}
    if None in durations.values():
        return None
    within = {start.name: seconds(start, _in_one_host(reaches[start.name])) for start in starts}

    def exchange(start: Start) -> float:
        return durations[start.name] or 0.0

    by_axes: dict[str, float] = {}
    for start in starts:
        axes = labels[start.name]
        by_axes[axes] = by_axes.get(axes, 0.0) + exchange(start)
    real = simulate(events, pace, exchange)
    one_host = simulate(events, pace, lambda start: within[start.name] or 0.0).step
    kernels = real.step - real.exposed
    return Expected(
        step=real.step,
        communication=real.communication,
        exposed=real.exposed,
        none_hidden=kernels + real.communication,
        all_hidden=max(kernels + exposed_in_any_case(events, pace, exchange), real.communication),
        one_host=one_host,
        efficiency=one_host / real.step if real.step else 1.0,
        by_axes=by_axes,
    )


def _in_one_host(reach: Reach) -> Reach:
    size = min(reach.size, HOST)
    return Reach(size, size)
