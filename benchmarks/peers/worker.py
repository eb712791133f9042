"""One framework in a process of its own, told over a pipe what to do: a line of JSON in, a line of JSON out.

Keras chooses its backend, and mpx its half-precision dtype, for a whole process. While a worker waits it costs nothing,
so that the parent can time several of them in turns.
"""

import functools
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


TRAINING: dict[str, tuple[str, dict]] = {
    "mpjax": ("with_mpjax", {}),
    "Flax linen": ("with_linen", {}),
    "mpx": ("with_mpx", {}),
    "Keras": ("with_keras", {}),
    "PyTorch": ("with_torch", {}),
    "PyTorch, compiled": ("with_torch", {"compiled": True}),
}
"""By name: the module of `peers.training`, and what its `start` is told."""

PROMISES: dict[str, str] = {name: module for name, (module, given) in TRAINING.items() if not given}
"""By name: the module of `peers.promises`."""

WARM_UP = 3


class Worker:
    """The parent's end of the pipe."""

    def __init__(self, name: str):
        path = os.pathsep.join(filter(None, [_BENCHMARKS, os.getenv("PYTHONPATH")]))
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "peers.worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def ask(self, command: str, *arguments: Any) -> Any:
        """Has the worker do something and waits for the answer.

        Raises:
          RuntimeError: it failed; the message is its traceback.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"failed": "the process ended"}
        if "failed" in answer:
            raise RuntimeError(f"{self.name}: {command} {arguments}: {answer['failed']}")
        return answer["done"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


_BENCHMARKS = str(Path(__file__).parents[1])


class _Session:
    """The worker's end: what it keeps between commands."""

    def __init__(self, name: str):
        self.name = name
        self.step: Callable[[int], Any] | None = None
        self.taken = 0

    def versions(self) -> dict[str, str]:
        module = importlib.import_module(f"peers.training.{TRAINING[self.name][0]}")
        return {package: importlib.metadata.version(package) for package in module.PACKAGES}

    def prepare(self, task: str, dtype: str) -> dict:
        """Builds the step; gives the seconds of its first call, and the metrics of the first ones."""
        self.step = None  # what it held is freed first
        module, given = TRAINING[self.name]
        start = importlib.import_module(f"peers.training.{module}").start
        self.step, self.taken = start(task, dtype, **given), 0
        seconds, metrics = [], []
        for _ in range(WARM_UP):
            spent, _, found = self._run(1)
            seconds.append(spent)
            metrics.append(found)
        return {"first_call_seconds": seconds[0], "step_seconds": min(seconds[1:]), "metrics": metrics}

    def time(self, steps: int) -> tuple[float, float]:
        """Seconds per step, on the clock and of all cores together."""
        clock, cores, _ = self._run(steps)
        return clock / steps, cores / steps

    def judge(self, sentence: str) -> dict:
        """Whether a sentence of the acceptance list is true of the framework."""
        from peers.promises.judge import judge

        return judge(importlib.import_module(f"peers.promises.{PROMISES[self.name]}"), sentence)

    def _run(self, steps: int) -> tuple[float, float, dict[str, float]]:
        assert self.step is not None
        began, began_cores = time.perf_counter(), time.process_time()
        metrics = {}
        for index in range(self.taken, self.taken + steps):
            metrics = self.step(index)
        found = {name: float(metrics[name]) for name in ("loss", "accuracy", "grad_norm")}  # waits for the last step
        self.taken += steps
        return time.perf_counter() - began, time.process_time() - began_cores, found


def main() -> None:
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    session = _Session(sys.argv[1])
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = {"done": functools.partial(getattr(session, command), *arguments)()}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
