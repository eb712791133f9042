"""Seconds per step of each framework, taken in turns, and the ratios between them."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence

from peers.tasks import DTYPES, Dtype, TaskName
from peers.worker import Worker


OWN = "mpjax"

LARGEST_ERROR: Mapping[Dtype, Mapping[str, float]] = {
    "float32": {"loss": 1e-5, "grad_norm": 1e-4},
    "bfloat16": {"loss": 2.0**-6, "grad_norm": 2.0**-4},
    "float16": {"loss": 2.0**-9, "grad_norm": 2.0**-7},
}
"""How far a first step may be from float32's, as a share of it.

In float32 only the order of sums differs: the ResNet's gradient norm is 2e-6 (JAX), 6e-6 (PyTorch) and 3e-5 (PyTorch,
compiled) from that of PyTorch in float64. In half precision the values are means of many rounded ones: twice the
distance from 1 to the next number, and four times that of a gradient that passed many layers.
"""


def measure(workers: Sequence[Worker], chosen: Sequence[TaskName], *, repeats: int, seconds: float) -> dict:
    """By task and dtype, what `measure_one` gives.

    Args:
      workers: one for each framework.
      chosen: of the tasks.
      repeats: how often each is timed.
      seconds: how long each time, about.

    Raises:
      AssertionError: a first step is not that of float32, to the error of its own dtype.
    """
    found: dict = {}
    for task in chosen:
        found[task] = {}
        for dtype in DTYPES:
            found[task][dtype] = measure_one(
                workers, task, dtype, found[task].get("float32"), repeats=repeats, seconds=seconds
            )
            print(f"{task} {dtype}: {json.dumps(found[task][dtype], indent=2)}", flush=True)
    return found


def measure_one(
    workers: Sequence[Worker], task: TaskName, dtype: Dtype, float32: Mapping | None, *, repeats: int, seconds: float
) -> dict:
    """Of each framework: `first_step`, `first_call_seconds`, `step_seconds`, and mpjax's `ratios` and `core_ratios`."""
    prepared, failed = {}, {}
    for worker in workers:
        try:
            prepared[worker.name] = worker.ask("prepare", task, dtype)
        except RuntimeError as error:
            failed[worker.name] = str(error).strip().splitlines()[-1].strip()
    first = {name: one["metrics"][0] for name, one in prepared.items()}
    errors = _errors(first, float32["first_step"] if float32 else dict.fromkeys(first, first[OWN]))
    _check(errors, dtype)
    present = [worker for worker in workers if worker.name in prepared]
    times = _in_turns(present, prepared, repeats=repeats, seconds=seconds)
    return {
        "first_step": first,
        "relative_errors": errors,
        "first_call_seconds": {name: one["first_call_seconds"] for name, one in prepared.items()},
        "step_seconds": {name: statistics.median(clock for clock, _ in each) for name, each in times.items()},
        "ratios": _ratios(times, 0),
        "core_ratios": _ratios(times, 1),
        "repeats": repeats,
        "failed": failed,
    }


def _errors(first: Mapping, like: Mapping) -> dict[str, dict[str, float]]:
    """Of each framework's first step: how far loss and gradient norm are from another's, as a share of it."""
    return {
        name: {what: abs(one[what] - like[name][what]) / abs(like[name][what]) for what in ("loss", "grad_norm")}
        for name, one in first.items()
    }


def _check(errors: Mapping, dtype: Dtype) -> None:
    for name, each in errors.items():
        for what, error in each.items():
            most = LARGEST_ERROR[dtype][what]
            assert error <= most, f"{name} {dtype}: {what} of the first step is off by {error:.2g} of itself"


def _in_turns(workers: Sequence[Worker], prepared: Mapping, *, repeats: int, seconds: float) -> dict[str, list]:
    steps = {name: max(1, math.ceil(seconds / one["step_seconds"])) for name, one in prepared.items()}
    times: dict[str, list] = {worker.name: [] for worker in workers}
    for turn in range(repeats):
        # Forwards and backwards: nobody is always behind the same one.
        for worker in workers if turn % 2 else reversed(workers):
            times[worker.name].append(worker.ask("time", steps[worker.name]))
    return times


def _ratios(times: Mapping[str, Sequence], which: int) -> dict[str, dict[str, float]]:
    """Of mpjax's times to everybody else's: on the clock (0), or of all cores together (1)."""
    each = {name: [pair[which] for pair in pairs] for name, pairs in times.items()}
    return {name: _ratio(each[OWN], other) for name, other in each.items() if name != OWN}


def _ratio(own: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Of mpjax's time to another's: the ratio of medians, and the quartiles of the ratios of one turn."""
    each = sorted(a / b for a, b in zip(own, other, strict=True))
    low, high = each[len(each) // 4], each[3 * len(each) // 4]
    return {"of_medians": statistics.median(own) / statistics.median(other), "lower": low, "upper": high}
