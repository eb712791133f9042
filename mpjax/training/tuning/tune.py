"""Tuning: time the products of a model in both dtypes, propose rules, and keep them if the whole step is faster."""

import concurrent.futures
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from mpjax.training.setup import Task
from mpjax.training.tuning.choice import Timed, rules_of
from mpjax.training.tuning.products import Product, Program, arrays_like
from mpjax.training.tuning.timing import GAIN, Timing, side_by_side


class Tuning(NamedTuple):
    """What was found.

    Attributes:
      timed: all modules that have products, those with equal programs together.
      proposed: the rules that keep what is slower in half precision in float32.
      step: the whole step, without these rules and with them; None if there are none.
    """

    timed: tuple[Timed, ...]
    proposed: dict[str, str]
    step: Timing | None

    @property
    def rules(self) -> dict[str, str]:
        """The rules to take: those proposed, if they make the step faster."""
        return self.proposed if self.step is not None and self.step.faster_by(GAIN) else {}

    def __str__(self) -> str:
        slow = sum(one.slower_in_half for one in self.timed)
        count = f"{slow} of {len(self.timed)} kinds of products are slower in half precision"
        if self.step is None:
            return f"{count}: no rules"
        kept = ", ".join(f"'{pattern}'" for pattern in self.proposed)
        before, after = (f"{1e3 * statistics.median(seconds):.4g} ms" for seconds in self.step)
        if not self.rules:
            return f"{count}, but with {kept} in float32 a step is no faster ({before} without, {after} with): no rules"
        gain = f"a step is {self.step.gain:.2f} times as fast ({before} to {after})"
        return f"{count}; rules keep {kept} in float32: {gain}"


def tune(
    task: Task,
    products: list[Product],
    time_step: Callable[[Mapping[str, str]], Timing],
    side_by_side: Callable[[Callable, Callable], Timing] = side_by_side,
) -> Tuning:
    """Times each kind of product once, then the step without and with the rules that follow.

    Args:
      task: the model under its policy, for what its modules have now.
      products: of the model.
      time_step: rules to the timing of a step without and with them.
      side_by_side: times two programs.
    """
    kinds = kinds_of(products)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Compiling takes the most of the time, and a processor each.
        compiled = [[_compiled(pool, program) for program in (one.half, one.full)] for one, *_ in kinds]
    timed = tuple(
        Timed(one.type, (one.path, *(other.path for other in others)), side_by_side(*map(_ready, programs)))
        for (one, *others), programs in zip(kinds, compiled, strict=True)
    )
    proposed = rules_of(timed, task.precision)
    return Tuning(timed, proposed, time_step(proposed) if proposed else None)


def kinds_of(products: list[Product]) -> list[list[Product]]:
    """Products of equal programs together, without those whose code decides by itself what it computes in."""
    kinds: dict[tuple[str, str], list[Product]] = {}
    for product in products:
        if product.half.text != product.full.text:
            kinds.setdefault((product.half.text, product.full.text), []).append(product)
    return list(kinds.values())


class _Compiled(NamedTuple):
    program: Program
    executable: concurrent.futures.Future


def _compiled(pool: concurrent.futures.Executor, program: Program) -> _Compiled:
    return _Compiled(program, pool.submit(jax.jit(program.run).lower(*program.inputs).compile))


def _ready(compiled: _Compiled) -> Callable[[], Any]:
    """The program on arrays of its own, which are there only while it is timed."""
    arrays = [arrays_like(shapes) for shapes in compiled.program.inputs]
    executable = compiled.executable.result()
    return lambda: executable(*arrays)
