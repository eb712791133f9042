"""One peer in a process of its own, so that no two frameworks share an allocator, and a crash ends no more than it."""

import contextlib
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from gpu.cases import Case, Peer, Row


class Settings(NamedTuple):
    """What holds for all peers.

    Attributes:
      small: whether cases are at sizes that any machine runs at once; PyTorch is then not compiled.
      cache: folder of compiled programs, which a later run finds again.
    """

    small: bool
    cache: str


class Failed(Exception):
    """What went wrong in a worker, in a line."""


class Worker:
    """A process that steps as one peer.

    Args:
      peer: who steps.
      settings: of all peers.
      share: of the device's memory, for a peer in JAX, which takes it at once; PyTorch takes what it needs.
    """

    def __init__(self, peer: Peer, settings: Settings, share: float):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, peer, settings, share))
        self.process.start()
        theirs.close()

    def ask(self, command: str, *arguments: Any, seconds: float) -> Any:
        """The answer to a command.

        Raises:
          Failed: it raised, the process died, or it took longer than `seconds`; after the last two the worker is gone.
        """
        try:
            self.connection.send((command, arguments))
            if not self.connection.poll(max(0.0, seconds)):
                self.close()
                raise Failed(f"no answer within {seconds:.0f} s")
            good, answer = self.connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise Failed(f"the process ended with code {self.process.exitcode}") from error
        if not good:
            raise Failed(answer)
        return answer

    def close(self) -> None:
        """Ends the process, which gives back its memory."""
        self.connection.close()
        self.process.join(timeout=1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def serve(connection: Connection, peer: Peer, settings: Settings, share: float) -> None:
    """Answers commands until the other end is closed."""
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(share)
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the older name: JAX wants one of the two
    if settings.small:
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(settings.cache, "torch")
    answers = Answers(peer, settings)
    with contextlib.suppress(Exception):  # while others are at work; what fails is told to whoever asks
        answers.get_ready()
    with contextlib.suppress(EOFError):
        while True:
            command, arguments = connection.recv()
            try:
                connection.send((True, getattr(answers, command)(*arguments)))
            except Exception as error:
                traceback.print_exc()
                connection.send((False, in_a_line(error)))


class Answers:
    """What a worker can be asked. Frameworks are imported only when something needs them."""

    def __init__(self, peer: Peer, settings: Settings):
        self.peer: Peer = peer
        self.settings = settings
        self.steppers: dict[Row, Any] = {}

    def get_ready(self) -> None:
        """Imports what every command needs; no device is touched yet."""
        if self.peer == "torch":
            import gpu.with_torch
        else:
            self._import_jax()
            import gpu.stepping
            import gpu.with_linen  # noqa: F401 (it imports mpjax's as well)

    def describe(self) -> dict:
        """The machine, the device and versions, for the header of the results."""
        if self.peer == "torch":
            from gpu.with_torch import describe

            return describe()
        self._import_jax()
        import jax
        from machine import describe

        device = jax.devices()[0]
        return {**describe(), "platform": device.platform, "platform_version": device.client.platform_version}

    def ceilings(self) -> dict:
        """What the device reaches at best."""
        self._import_jax()
        from gpu.ceilings import ceilings

        return ceilings(small=self.settings.small)

    def reference(self, case: Case) -> dict:
        """The first step in float32 throughout, and in JAX its number of operations."""
        row = Row(peer=self.peer, policy="float32")
        if self.peer == "torch":
            from gpu.with_torch import Stepper

            return Stepper(case, row, compiled=False, full_precision=True).first
        jax = self._import_jax()
        pieces = {"pieces": case.pieces} if case.pieces > 1 else {}
        with jax.default_matmul_precision("highest"):
            try:
                # It is not timed: what the compiler finds by trying is not needed, if it can do without.
                stepper = self._in_jax(case, row, {"gpu": {"xla_gpu_autotune_level": 0}}, **pieces)
            except RuntimeError:
                stepper = self._in_jax(case, row, {}, **pieces)
        return {**stepper.first, "flops": stepper.facts["flops"]}

    def prepare(self, case: Case, row: Row) -> dict:
        """Compiles a step and takes the first ones: `facts` and `first`."""
        if self.peer == "torch":
            from gpu.with_torch import Stepper

            try:
                stepper = Stepper(case, row, compiled=not self.settings.small)
            except Exception as error:  # of many kinds: a compiler that is not there, one that cannot
                stepper = Stepper(case, row, compiled=False)
                stepper.facts["why_not_compiled"] = in_a_line(error)
        else:
            self._import_jax()
            stepper = self._in_jax(case, row, {})
        self.steppers[row] = stepper
        return {"facts": stepper.facts, "first": stepper.first}

    def measure(self, row: Row, seconds: float) -> float:
        """Seconds per step, of as many as fill about `seconds`."""
        stepper = self.steppers[row]
        warm = timed(stepper, 2)
        found = timed(stepper, max(1, math.ceil(seconds / warm)))
        if hasattr(stepper, "rest"):
            stepper.rest()
        return found

    def drop(self, row: Row) -> None:
        """Forgets a step and its state."""
        del self.steppers[row]

    def _in_jax(self, case: Case, row: Row, options: dict[str, dict], **settings: int):
        """A step with these settings, compiled with the options for the platform at hand."""
        import jax

        from gpu.stepping import Stepper

        if self.peer == "linen":
            from gpu.with_linen import written
        else:
            from gpu.with_mpjax import written
        if self.settings.small:  # what is not timed need not be fast
            options = {**options, "cpu": {"xla_backend_optimization_level": 0}}
        return Stepper(written(case, row, **settings), options.get(jax.default_backend()))

    def _import_jax(self):
        import jax

        jax.config.update("jax_compilation_cache_dir", os.path.join(self.settings.cache, "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        return jax


def timed(stepper: Any, steps: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per step of `steps` steps, the last one waited for."""
    start = clock()
    for _ in range(steps):
        stepper.run()
    stepper.wait()
    return (clock() - start) / steps


def in_a_line(error: BaseException) -> str:
    """An error's type and what it says first, for a table."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:300]}" if said else type(error).__name__
