"""A training step in JAX, compiled ahead of time: what it costs, what it computes first, and how to run it."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from mpjax.plan import parse, traffic_of
from mpjax.precision.casting import flops_of


SKIPS = 20
"""Steps that a dynamic loss scale may skip before the first one that is applied."""


class Written(NamedTuple):
    """A training step as it was written.

    Attributes:
      step: jit-compiled, `(state, batch) -> (state, metrics)`, donates the state; metrics have `loss`, and `finite` or
        `grad_norm` where there is such a thing.
      make_state: key to the state before the first step.
      make_batch: key to random inputs.
      parameters: how many it trains.
    """

    step: Any
    make_state: Callable
    make_batch: Callable
    parameters: Callable[[Any], Any]

    def abstract(self) -> tuple[Any, Any]:
        """State and batch without arrays."""
        key = jax.eval_shape(lambda: random_key(0))
        return jax.eval_shape(self.make_state, key), jax.eval_shape(self.make_batch, key)


def random_key(seed: int) -> jax.Array:
    """Of a generator that compiles in a fraction of the usual one's time."""
    return jax.random.key(seed, impl="rbg")


class Stepper:
    """A compiled step, its state, and a batch that stays on the device."""

    def __init__(self, written: Written, options: Mapping[str, Any] | None = None):
        device = jax.local_devices()[0]
        before = (device.memory_stats() or {}).get("bytes_in_use", 0), peak_bytes()
        self.state = jax.jit(written.make_state)(random_key(0))
        self.batch = jax.jit(written.make_batch)(random_key(1))
        start = time.perf_counter()
        traced = written.step.trace(self.state, self.batch)
        lowered = traced.lower()
        middle = time.perf_counter()
        self.compiled = lowered.compile(compiler_options=dict(options or {}))
        self.facts: dict[str, Any] = {
            "parameters": sum(p.size for p in jax.tree.leaves(written.parameters(self.state))),
            "trace_seconds": middle - start,
            "compile_seconds": time.perf_counter() - middle,
            "flops": sum(flops_of(traced.jaxpr).values()),
            **program_facts(self.compiled),
        }
        self.metrics: Any = {}
        self.first = self._first()
        if (peak := peak_bytes()) and peak > (before[1] or 0):
            self.facts["device_peak_bytes"] = peak - before[0]

    def run(self) -> None:
        """Starts a step; does not wait for it."""
        self.state, self.metrics = self.compiled(self.state, self.batch)

    def wait(self) -> None:
        """Returns when all steps are done."""
        jax.block_until_ready((self.state, self.metrics))

    def _first(self) -> dict[str, float]:
        """`loss` and `grad_norm` of the first step that is applied, `second_loss` after it, how many were `skipped`."""
        for skipped in range(SKIPS):
            self.run()
            metrics = jax.device_get(dict(self.metrics))
            if bool(metrics.get("finite", True)):
                self.run()
                kept = {name: float(metrics[name]) for name in ("loss", "grad_norm") if name in metrics}
                return {**kept, "second_loss": float(jax.device_get(self.metrics["loss"])), "skipped": skipped}
        raise FloatingPointError(f"the gradients of {SKIPS} steps in a row were not finite")


def peak_bytes() -> int | None:
    """The most memory that was in use on the device since the process began; None where it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def program_facts(compiled) -> dict[str, Any]:
    """Bytes that a compiled program needs and moves, and its kernels; what it does not tell is left out."""
    facts: dict[str, Any] = {}
    if memory := _told(compiled.memory_analysis):
        names = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
        argument, output, alias, temp = (getattr(memory, name) for name in names)
        facts |= {"program_bytes": argument + output - alias + temp, "temp_bytes": temp}
    if program := _told(compiled.as_text):
        moved = traffic_of(parse(program))
        facts |= {"traffic_bytes": moved.bytes, "kernels": moved.kernels, "calls": dict(moved.calls)}
    cost = _told(compiled.cost_analysis)
    if isinstance(cost, Mapping):
        facts |= {f"xla_{name.replace(' ', '_')}": cost[name] for name in ("flops", "bytes accessed") if name in cost}
    return facts


def _told(method: Callable) -> Any:
    """What a compiled program says of itself; None where a platform, or a program from a cache, says nothing."""
    try:
        return method()
    except (RuntimeError, NotImplementedError):
        return None
