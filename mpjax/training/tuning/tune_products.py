"""Tunes a model: times its products in both dtypes, proposes rules, and keeps them if the step gets faster."""

import concurrent.futures
import hashlib
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from mpjax import strict_json
from mpjax.files import write_atomically
from mpjax.training.setup import Task
from mpjax.training.tuning.products import ModuleProgram, Product, arrays_like
from mpjax.training.tuning.timing import GAIN, Timed, Timing, rules_of, side_by_side


class Tuning(NamedTuple):
    """The result of tuning.

    Attributes:
      timed: the timed modules, grouped by equal programs.
      proposed: the rules that keep modules slower in half precision in float32.
      step: the timing of the whole step without and with these rules; None if there are no rules.
    """

    timed: tuple[Timed, ...]
    proposed: dict[str, str]
    step: Timing | None

    @property
    def rules(self) -> dict[str, str]:
        """The proposed rules if they make the step faster, else no rules."""
        return self.proposed if self.step is not None and self.step.faster_by(GAIN) else {}

    def __str__(self) -> str:
        slow = sum(kind.slower_in_half for kind in self.timed)
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
    """Times one product of each kind in both dtypes, then the step without and with the proposed rules, if any.

    Args:
      task: the model under its policy, with the present dtypes of its modules.
      products: the products of the model.
      time_step: maps rules to the timing of a step without and with them.
      side_by_side: times two programs.
    """
    kinds = kinds_of(products)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Compilation takes most of the time and occupies one processor per program.
        compiled = [[_compiled(pool, program) for program in (first.half, first.full)] for first, *_ in kinds]
    timed = tuple(
        Timed(first.type, (first.path, *(other.path for other in others)), side_by_side(*map(_ready, programs)))
        for (first, *others), programs in zip(kinds, compiled, strict=True)
    )
    proposed = rules_of(timed, task.precision)
    return Tuning(timed, proposed, time_step(proposed) if proposed else None)


def kinds_of(products: list[Product]) -> list[list[Product]]:
    """Groups products by equal programs; leaves out products with the same program in both dtypes."""
    kinds: dict[tuple[str, str], list[Product]] = {}
    for product in products:
        if product.half.text != product.full.text:
            kinds.setdefault((product.half.text, product.full.text), []).append(product)
    return list(kinds.values())


class _Compiled(NamedTuple):
    program: ModuleProgram
    executable: concurrent.futures.Future


def _compiled(pool: concurrent.futures.Executor, program: ModuleProgram) -> _Compiled:
    return _Compiled(program, pool.submit(jax.jit(program.run).lower(*program.inputs).compile))


def _ready(compiled: _Compiled) -> Callable[[], Any]:
    """Waits for the compiled program, and makes a function that runs it on new arrays, freed after the timing."""
    arrays = [arrays_like(shapes) for shapes in compiled.program.inputs]
    executable = compiled.executable.result()
    return lambda: executable(*arrays)


def read_tuning(folder: pathlib.Path, key: Mapping[str, Any]) -> Tuning | None:
    """Reads the stored result of tuning; None if there is none or the file is damaged.

    Args:
      folder: the folder of the results.
      key: what a result depends on, such as device and model, as JSON values by name.
    """
    try:
        stored = json.loads(tuning_file(folder, key).read_text())
        timed = tuple(_timed(kind) for kind in stored["products"])
        rules = dict.fromkeys(stored["rules"], "float32")
        tuning = Tuning(timed, rules, _timing(stored["step"]) if rules else None)
        # Any other key, and a value of another type, is written otherwise than it was found.
        return tuning if _content(key, tuning) == stored else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def write_tuning(folder: pathlib.Path, key: Mapping[str, Any], tuning: Tuning) -> pathlib.Path:
    """Writes the result of tuning, for `read_tuning` with the same `key`, and returns the path of the file."""
    file = tuning_file(folder, key)
    content = strict_json.encode(_content(key, tuning), indent=2)
    write_atomically(file, f"{content}\n".encode())  # another run may read the file
    return file


def tuning_file(folder: pathlib.Path, key: Mapping[str, Any]) -> pathlib.Path:
    """The path of the result, named after device, model and a digest of the whole key."""
    digest = hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()[:12]
    words = "-".join(str(key[name]) for name in ("device", "model") if name in key)
    return folder / ("".join(c if c.isalnum() else "_" for c in words) + f"-{digest}.json")


def _plain(key: Mapping[str, Any]):
    """The key after a round trip through JSON."""
    return json.loads(json.dumps(key))


def _content(key: Mapping[str, Any], tuning: Tuning) -> dict[str, Any]:
    """The content of the file of a result, as JSON values."""
    kinds = [{"type": kind.type, "modules": kind.modules, **kind.timing._asdict()} for kind in tuning.timed]
    step = tuning.step and tuning.step._asdict()
    return strict_json.spelled({"key": _plain(key), "products": kinds, "rules": tuning.proposed, "step": step})


def _timed(found: Mapping[str, Any]) -> Timed:
    return Timed(str(found["type"]), tuple(map(str, found["modules"])), _timing(found))


def _timing(found: Mapping[str, Any]) -> Timing:
    timing = Timing(tuple(map(float, found["half"])), tuple(map(float, found["full"])))
    if not len(timing.half) == len(timing.full) >= 2 or not all(0 < x < math.inf for x in timing.half + timing.full):
        raise ValueError("a timing is of two or more rounds, each of positive seconds for both programs")
    return timing
