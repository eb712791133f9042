"""Finds the layers of a run that are faster in float32 than in half precision on this device.

    python examples/tune_products.py --model.name xception --data.batch_size 64

Takes the settings of scripts/train.py, and prints the rules to train with, such as `--precision.rules "*/depthwise"
float32`. Grouped and depthwise convolutions are the known case. All of it has been measured on CPUs only.

1. `products_of` finds the modules with a matrix product or a convolution, and makes two programs of each: its forward
   and backward pass in half precision, and in float32 with casts at its boundary.
2. `side_by_side` times two programs in turns. Modules with equal programs are timed once.
3. `rules_of` chooses rules for the modules that are slower in half precision.
4. The step of the run is timed without and with these rules, which are dropped if they do not make it faster.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import glob
import itertools
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from mpjax.cli import exit_code
from mpjax.commands import Run, build_run, fitted, fresh_state
from mpjax.config import is_auto, load_config
from mpjax.precision import FLOAT32, HALF, HEAD, NORM, covers, is_floating, modules_of, scope_lineage, widest, wrap
from mpjax.training import Task, put_on_devices


PRODUCTS = ("dot_general", "conv_general_dilated")

SHORTEST = 0.004
"""Shortest duration of a timing in seconds; shorter programs run several times per timing."""

MARGIN = 0.1
"""A module is slower in half precision if float32 is faster by this share in at least three quarters of the rounds."""

GAIN = 0.01
"""Rules are kept if they make a step faster by this share in at least three quarters of the rounds."""


def main(argv: Sequence[str]) -> None:
    """Runs the program; raises UsageError as `tune` and `load_config`."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--rounds ROUNDS] [settings of scripts/train.py]",
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=9, help="timings of each program, 2 or more")
    options, settings = parser.parse_known_args(argv)
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: wanted 2 or more")
    config = load_config(settings, prog=parser.prog)
    if rules := tune(config, functools.partial(side_by_side, rounds=options.rounds)):
        print("train with", shlex.join(["--precision.rules", *itertools.chain(*rules.items())]))


class Timing(NamedTuple):
    """Seconds per run of two programs, one number for each round.

    Attributes:
      half: seconds of the program in half precision, or of the step without the rules.
      full: seconds of the program in float32, or of the step with the rules.
    """

    half: tuple[float, ...]
    full: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The time of the first program divided by that of the second, the median over the rounds."""
        return statistics.median(self._ratios)

    def faster_by(self, margin: float) -> bool:
        """True if the second is faster by more than `margin` in at least three quarters of the rounds."""
        return statistics.quantiles(self._ratios, n=4, method="inclusive")[0] > 1 + margin

    @property
    def _ratios(self) -> list[float]:
        return [half / full for half, full in zip(self.half, self.full, strict=True)]

    def __str__(self) -> str:
        half, full = (f"{1e3 * statistics.median(seconds):.4g} ms" for seconds in self)
        return f"{half} and {full}"


Clock = Callable[[Callable[[], Any], Callable[[], Any]], Timing]


def tune(config: mpjax.Config, clock: Clock) -> dict[str, str]:
    """Finds the rules that make the step of a run faster, and prints the timings.

    Args:
      config: the settings of the run.
      clock: times two functions without arguments.

    Returns:
      All rules to train with, pattern to dtype: those of `config`, then the new ones; empty if there are no new ones.

    Raises:
      UsageError: the settings are invalid, or there is nothing to time.
    """
    if config.model.scan_blocks:
        raise mpjax.UsageError("products are timed block by block: write --model.no_scan_blocks")
    if config.distributed.processes > 1:
        raise mpjax.UsageError("products are timed in one process: leave out --distributed")
    if is_auto(config):
        config, message = fitted(config)
        print(message)
    run = build_run(config)
    policy = run.plan.policy
    if policy.compute_dtype not in HALF:
        raise mpjax.UsageError(
            f"--precision.policy {config.precision.policy} computes in {policy.compute_dtype}: write a policy that "
            "computes in half precision, such as mixed_float16"
        )
    batch = next(iter(run.batches.from_position(0)))
    kinds = kinds_of(products_of(run.task, policy, _micro_batch(run, batch)))
    print(f"{len(kinds)} kinds of products, in half precision and in float32:", flush=True)
    timed = []
    for kind, timing in zip(kinds, _timings(kinds, clock), strict=True):
        timed.append(Timed(tuple(product.path for product in kind), timing))
        print(f"  {timed[-1]} ({kind[0].type})", flush=True)
    if not (added := rules_of(timed, run.task.precision)):
        print("none is slower in half precision: no rules")
        return {}
    rules = {**config.precision.rules, **added}
    ruled = dataclasses.replace(config, precision=dataclasses.replace(config.precision, rules=rules))
    step = clock(_step_of(run, batch), _step_of(build_run(ruled), batch))
    kept = ", ".join(f"'{pattern}'" for pattern in added)
    verdict = f"{step.gain:.2f} times as fast" if step.faster_by(GAIN) else "no faster: no rules"
    print(f"a step without and with {kept} in float32: {step}, {verdict}")
    return rules if step.faster_by(GAIN) else {}


class Program(NamedTuple):
    """The forward and backward pass of one module.

    Attributes:
      run: maps two lists of arrays, differentiated and not, to output and gradients; not compiled.
      inputs: shapes and dtypes of the two lists.
      text: the jaxpr as text; programs with the same text need to be timed only once.
    """

    run: Callable
    inputs: tuple[list, list]
    text: str


class Product(NamedTuple):
    """A module that contains matrix products or convolutions.

    Attributes:
      path: the path of the module.
      type: the name of its class.
      half: the program in half precision.
      full: the program in float32 with half-precision input and output, including the casts between them.
    """

    path: str
    type: str
    half: Program
    full: Program


def products_of(task: Task, policy: mpjax.Policy, batch: Mapping[str, Any]) -> list[Product]:
    """Finds the outermost submodules with products of their own that no rule of the user decides, in order of calls.

    Args:
      task: the model and its loss.
      policy: the half-precision policy of the model.
      batch: the shapes of one device's micro-batch.
    """
    calls: dict[str, tuple] = {}

    def loss(params, stats, key, batch):
        model = task.structure.assemble(params, stats, key)
        model.train()
        for path, module in modules_of(model).items():
            wrap(module, _Recording(path, calls))
        return task.objective.loss(model, batch, key)[0].value

    _, params, stats = mpjax.take_apart(task.abstract)
    operations = mpjax.audit(loss, params, stats, jax.random.key(0), batch).operations
    modules = modules_of(task.abstract)
    owners = {_innermost(modules, row.path) for row in operations if row.operation in PRODUCTS}
    products: dict[str, Product] = {}
    for path in sorted(owners & set(calls) - {""}, key=lambda path: path.count("/")):
        if _is_open(path, task.precision) and not any(is_in(path, outer) for outer in products):
            half, full = (_program(modules[path], calls[path], policy, d) for d in (policy.compute_dtype, FLOAT32))
            products[path] = Product(path, type(modules[path]).__name__, half, full)
    return [products[path] for path in calls if path in products]


def is_in(path: str, module: str) -> bool:
    """True if `path` is the path of `module` or of a module inside it."""
    return f"{path}/".startswith(f"{module}/")


def _innermost(modules: Iterable[str], scope: str) -> str:
    return max((path for path in modules if path and is_in(scope, path)), key=len, default="")


def _is_open(path: str, report: mpjax.precision.PolicyReport) -> bool:
    """True if no rule of the user decides the module or a module inside it."""
    return all(row.rule in ("policy", NORM, HEAD) for row in report if is_in(row.path, path))


@dataclasses.dataclass(frozen=True, eq=False)
class _Recording:
    """A wrapper that records the abstract arguments of a module's first call."""

    path: str
    calls: dict[str, tuple]
    depth: ClassVar[int] = -1

    def __call__(self, call, module, *args, **kwargs):
        def abstract(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | np.ndarray) else leaf

        self.calls.setdefault(self.path, jax.tree.map(abstract, (args, kwargs)))
        return call(module, *args, **kwargs)


def _program(module: nnx.Module, call: tuple, policy: mpjax.Policy, compute_dtype: np.dtype) -> Program:
    """Builds a program of a module that computes in `compute_dtype`; input and output have the dtype of the policy.

    `call` holds the positional and the keyword arguments of the module, with shapes in place of arrays.
    """
    module = nnx.merge(*nnx.split(module))
    outside = policy.compute_dtype
    mpjax.apply_policy(module, mpjax.Policy(widest(policy.param_dtype, compute_dtype), compute_dtype, outside))
    module.train()
    graph, *state = nnx.split(module, nnx.Param, ...)

    def as_input(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, outside) if _is_abstract(leaf) and is_floating(leaf) else leaf

    leaves, treedef = jax.tree.flatten((state, jax.tree.map(as_input, call)))
    moved = [i for i, leaf in enumerate(leaves) if _is_abstract(leaf) and is_floating(leaf)]
    fixed = [i for i, leaf in enumerate(leaves) if _is_abstract(leaf) and not is_floating(leaf)]

    def run(by: list, others: list):
        def forward(by: list):
            filled = list(leaves)
            for i, array in zip((*moved, *fixed), (*by, *others), strict=True):
                filled[i] = array
            state, (args, kwargs) = jax.tree.unflatten(treedef, filled)
            return nnx.merge(graph, *state)(*args, **kwargs)

        # The output is its own cotangent: it has the right shape and is not zero.
        output, pull = jax.vjp(forward, by)
        return output, pull(output)

    inputs = [leaves[i] for i in moved], [leaves[i] for i in fixed]
    text = re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(*inputs)))
    return Program(run, inputs, text)


def _is_abstract(leaf) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def kinds_of(products: Iterable[Product]) -> list[list[Product]]:
    """Groups products by equal programs; leaves out products with the same program in both dtypes."""
    kinds: dict[tuple[str, str], list[Product]] = {}
    for product in products:
        if product.half.text != product.full.text:
            kinds.setdefault((product.half.text, product.full.text), []).append(product)
    return list(kinds.values())


def _timings(kinds: list[list[Product]], clock: Clock) -> Iterable[Timing]:
    """Times one product of each kind."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Compilation takes most of the time and occupies one processor per program.
        compiled = [[_compiled(pool, program) for program in (first.half, first.full)] for first, *_ in kinds]
    for programs in compiled:
        yield clock(*(_ready(*program) for program in programs))


def _compiled(pool: concurrent.futures.Executor, program: Program) -> tuple[Program, concurrent.futures.Future]:
    return program, pool.submit(jax.jit(program.run).lower(*program.inputs).compile)


def _ready(program: Program, compiling: concurrent.futures.Future) -> Callable[[], Any]:
    """Builds a function that runs a compiled program on new arrays, freed after the timing."""
    arrays = [arrays_like(shapes) for shapes in program.inputs]
    executable = compiling.result()
    return lambda: executable(*arrays)


def arrays_like(shapes: list) -> list[jax.Array]:
    """Creates arrays of these shapes, which are not zero, because some processors are faster on zeros."""

    def one(number: int, shape) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), number)
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(key, shape.shape)
        if is_floating(shape):
            return (jax.random.normal(key, shape.shape) * np.float32(0.1)).astype(shape.dtype)
        return jnp.ones(shape.shape, shape.dtype)

    return [one(number, shape) for number, shape in enumerate(shapes)]


def side_by_side(half: Callable[[], Any], full: Callable[[], Any], rounds: int) -> Timing:
    """Measures the run times of two functions that return arrays, alternating, after a warm-up run of each."""
    for run in (half, full):
        _seconds(run, 1)
    repeats = [max(1, math.ceil(SHORTEST / max(_seconds(run, 1), 1e-7))) for run in (half, full)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            run = (half, full)[which]
            seconds[which].append(_seconds(run, repeats[which]) / repeats[which])
    return Timing(tuple(seconds[0]), tuple(seconds[1]))


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    results = None
    for _ in range(repeats):
        results = run()
    jax.block_until_ready(results)
    return time.perf_counter() - start


class Timed(NamedTuple):
    """Modules with equal programs, and their timing.

    Attributes:
      modules: their paths.
      timing: the forward and backward pass of one of them, in half precision and in float32.
    """

    modules: tuple[str, ...]
    timing: Timing

    @property
    def slower_in_half(self) -> bool:
        """True if float32 is faster by more than `MARGIN` in at least three quarters of the rounds."""
        return self.timing.faster_by(MARGIN)

    def __str__(self) -> str:
        slower = ", slower in half precision" if self.slower_in_half else ""
        return f"{', '.join(self.modules)}: {self.timing}{slower}"


def rules_of(timed: Iterable[Timed], report: mpjax.precision.PolicyReport) -> dict[str, str]:
    """Chooses rules, pattern to "float32", that cover exactly the modules that are slower in half precision.

    Args:
      timed: the timed modules.
      report: the dtypes and the deciding rule of each module without these rules.
    """
    slow = {path for kind in timed if kind.slower_in_half for path in kind.modules}
    rest = [row.path for row in report if row.rule != NORM and not any(is_in(row.path, path) for path in slow)]
    patterns: list[str] = []
    for path in sorted(slow):
        if not any(_covers(pattern, path) for pattern in patterns):
            patterns.append(next(p for p in _candidates(path) if not any(_covers(p, other) for other in rest)))
    return dict.fromkeys(patterns, "float32")


def _candidates(path: str) -> Sequence[str]:
    """Patterns for a path, the widest first: its last name anywhere, as `*/depthwise`, then the path itself."""
    name = path.rpartition("/")[2]
    alone = glob.escape(path)
    return [alone] if name == path or name.isdecimal() else [f"*/{glob.escape(name)}", alone]


def _covers(pattern: str, path: str) -> bool:
    return covers(pattern, scope_lineage(path))


def _micro_batch(run: Run, batch: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of one device's share of a micro-batch."""
    shares = run.layout.shares * run.config.training.accumulate
    return {name: jax.ShapeDtypeStruct((max(1, len(x) // shares), *x.shape[1:]), x.dtype) for name, x in batch.items()}


def _step_of(run: Run, batch: Mapping[str, np.ndarray]) -> Callable[[], Any]:
    """Builds a function that runs the compiled step of a run once, on a state that it keeps for its next call."""
    state = run.packing.pack(fresh_state(run))
    placed = put_on_devices(batch, run.batch_sharding)
    step = run.train_step.lower(state, placed).compile()

    def once():
        nonlocal state
        state, metrics = step(state, placed)
        return metrics

    return once


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
