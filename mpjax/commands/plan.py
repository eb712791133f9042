"""Plans a run: compiles its step for each GPU and policy, and shows a table, a plot or JSON."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax import notebook, strict_json
from mpjax.commands.build import require_folder_for_task
from mpjax.commands.learner import make_learner
from mpjax.config.durations import Duration
from mpjax.config.folders import data_folder
from mpjax.config.limits import check
from mpjax.config.paths import expanded
from mpjax.config.plan import GpuName, Plan
from mpjax.config.schema import Config, with_settings
from mpjax.data.fields import Fields, batch_shapes
from mpjax.data.orientation import orientation_of
from mpjax.mesh_axes import TENSOR
from mpjax.plan.compiled import PlannedStep, x64_if_float64
from mpjax.plan.compiler import install_compiler
from mpjax.plan.devices import GPUS, HOST
from mpjax.plan.estimate import Estimate, estimates
from mpjax.plan.known_sets import planned_fields
from mpjax.plan.measure import Measured, is_here, measure_step
from mpjax.plan.mesh_table import UNPLANNED, as_json, conclusions, flags, search_title, table_of_meshes
from mpjax.plan.meshes import Search, search_mesh
from mpjax.plan.plot import plot_plans
from mpjax.plan.table import columns, comparisons, costliest_table, duration, plan_table, rows, title
from mpjax.report.wording import subject_of
from mpjax.training.precision_plan import plan_precision
from mpjax.training.setup import make_state


class Plans(dict[str, Any]):
    """The result of `plan_run`: the dict that `--json` prints. A notebook shows it as a table for each kind of GPU.

    Attributes:
      estimates: the plans, grouped by GPU.
    """

    estimates: tuple[Estimate, ...]

    def __init__(self, contents: Mapping[str, Any], estimates: Sequence[Estimate]):
        super().__init__(contents)
        self.estimates = tuple(estimates)

    def _repr_html_(self) -> str:
        elements = []
        for gpu in dict.fromkeys(plan.gpu for plan in self.estimates):
            estimates = [plan for plan in self.estimates if plan.gpu == gpu]
            titles = [plan.title for plan in estimates]
            if len(set(titles)) < len(titles):  # of a search for a mesh
                titles = [f"{plan.title} {flags(plan)}" for plan in estimates]
            heads = ["per step and GPU", *titles]
            table = notebook.table(heads, [[label, *cells] for label, cells in rows(estimates)])
            elements += [notebook.heading(title(estimates)), table, notebook.paragraphs(comparisons(estimates))]
        return notebook.block(*elements)


def scaling_title(plans: Sequence[Estimate]) -> str:
    """Formats the title of a scaling table in two lines, or one line of advice if the plans have no scaling.

    A plan has none if the mesh axis that would grow has size 1, because its program then has no collective over it.
    """
    first, gpu = plans[0], GPUS[plans[0].gpu]
    axis = f"--mesh.{first.communication.grows}"
    if not first.communication.scaling:
        return f"{axis} is 1, so the program says nothing of more GPUs: for scaling, plan --devices {2 * first.devices}"
    between = f"{gpu.network / 1e9:g} GB/s per GPU" if gpu.network else "not known"
    return (
        f"expected step and efficiency, {first.batch / first.devices:g} examples on each GPU, {axis} grows\n"
        f"links within a host of {HOST}: {gpu.link / 1e9:g} GB/s per GPU; between hosts: {between}"
    )


def scaling_table(plans: Sequence[Estimate]):
    """Builds a `rich` table of step time and efficiency, with a row per number of GPUs and a column per plan."""
    return columns("GPUs", plans, scaling_rows(plans))


def scaling_rows(plans: Sequence[Estimate]) -> list[tuple[str, list[str]]]:
    """Lists, for each number of GPUs, the number as text and a cell per plan: its step time and its efficiency in %."""
    by_devices: dict[int, list[str]] = {}
    for plan in plans:
        for scale in plan.communication.scaling:
            by_devices.setdefault(scale.devices, []).append(f"{duration(scale.timing.step)} {scale.efficiency:6.1%}")
    return [(str(devices), cells) for devices, cells in by_devices.items()]


EPOCH = 1000
"""Steps per epoch, to convert durations in epochs. Schedules change constants of the program, not its cost."""


LEFT_OUT = (
    "Rates are from data sheets. Traffic is an upper bound: it assumes that no kernel reads from a cache what the one "
    "before wrote. Workspaces of convolutions are chosen on the device and not included; see docs/plan.md."
)


SCALING = (
    "Expected times take kernels and links at their full rates, without latency. For other numbers of GPUs the groups "
    "of the program's collectives grow; its kernels and arrays stay as compiled."
)


def plan_run(
    settings: Plan,
    config: Config,
    *,
    present: Callable[[GpuName, int], bool] = is_here,
    measure: Callable[[PlannedStep, Fields], Measured] | None = None,
) -> Plans:
    """Predicts memory and step time of the run that `config` describes, for each GPU and policy, and prints them.

    It compiles the training step for each, which needs no GPU and trains nothing. With `settings.plot`, it also draws
    them to that file.

    Args:
      settings: the GPUs and policies, and the form of the output.
      config: the settings of the run.
      present: `(gpu, count)`: True if `count` GPUs of that name are present.
      measure: times a step on the present GPU, if it fits and `settings.measure` is set. None: `measure_step`.

    Returns:
      The dict that `--json` prints, which a notebook shows as tables; empty after `--install` without GPUs.

    Raises:
      UsageError: the settings are invalid, the shapes of the data set are unknown, or XLA's compiler for CUDA is
        missing or cannot be installed.
    """
    settings.check(config)
    if settings.install:
        print(f"XLA's compiler for CUDA: {install_compiler()}", file=sys.stderr)
        if not settings.gpu:
            return Plans({}, ())
    measure = measure or functools.partial(measure_step, seed=config.seed, ema=config.training.ema > 0)
    policies = settings.policies or (config.precision.policy,)
    fields = fields_of(config, vocabulary=settings.vocabulary)
    runs = [with_settings(config, {"precision.policy": policy}) for policy in policies]
    if settings.search == "mesh":
        return _searched(settings, config, _step_of_meshes(runs[0], fields))
    steps = [
        dataclasses.replace(planned_step(run, fields), xla=options) for run in runs for options in ("", *settings.xla)
    ]
    plans = estimates(
        settings.gpu,
        steps,
        devices=settings.devices,
        attention=settings.attention,
        most=settings.costliest,
        receipts=settings.receipt,
        memory_fraction=settings.memory_fraction,
        fit=settings.fit,
        verify=settings.verify,
    )
    if settings.measure:
        # The smallest first: a device reports its peak memory since the process began.
        for plan in sorted(plans, key=lambda plan: plan.memory.total):
            if plan.fits and present(plan.gpu, plan.devices):
                step = next(step for step in steps if (step.policy, step.xla) == (plan.policy, plan.xla))
                plans[plans.index(plan)] = dataclasses.replace(plan, measured=measure(step, fields))
    described = [_described(plan) for plan in plans]
    result = Plans({"model": str(config.model.name), "data": str(config.data.name), "plans": described}, plans)
    if settings.json:
        print(strict_json.encode(result))
    else:
        _print(settings, plans)
    if settings.plot:
        plot_plans(plans, expanded(settings.plot), f"{subject_of(config)}, batch {plans[0].batch}")
    return result


def _searched(settings: Plan, config: Config, step: PlannedStep) -> Plans:
    """Searches the fastest mesh of a step for each GPU, and prints the meshes that were compared."""
    searches = [
        search_mesh(
            gpu,
            step,
            settings.devices,
            attention=settings.attention,
            memory_fraction=settings.memory_fraction,
            say=lambda line: print(line, file=sys.stderr),
        )
        for gpu in settings.gpu
    ]
    plans = [plan for search in searches for plan in search.plans]
    contents = {"model": str(config.model.name), "data": str(config.data.name)}
    result = Plans(
        {**contents, "plans": [_described(plan) for plan in plans], "search": [as_json(each) for each in searches]},
        plans,
    )
    if settings.json:
        print(strict_json.encode(result))
    else:
        _print_searches(searches)
    return result


def _step_of_meshes(config: Config, fields: Fields) -> PlannedStep:
    """Builds the step of a search, which on meshes that do not divide `tensor` leaves `--mesh.sequence` out."""
    step = planned_step(config, fields)
    if not config.mesh.sequence:
        return step
    whole = planned_step(with_settings(config, {"mesh.sequence": False}), fields)
    return dataclasses.replace(step, build_on=lambda mesh: (step if mesh.shape[TENSOR] > 1 else whole).build_on(mesh))


def _print_searches(searches: Sequence[Search]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    for search in searches:
        for line in (search_title(search), table_of_meshes(search), *conclusions(search), ""):
            console.print(line, markup=False, emoji=False, soft_wrap=isinstance(line, str))
    console.print(UNPLANNED, markup=False, emoji=False, soft_wrap=True)


def fields_of(config: Config, *, vocabulary: int = 0) -> Fields:
    """Finds the fields of a run's batches (`planned_fields`); a `vocabulary` of 0 means that of the run's tokenizer."""
    require_folder_for_task(config)
    return planned_fields(config.task, config.data, data_folder(config), vocabulary=vocabulary)


def planned_step(config: Config, fields: Fields) -> PlannedStep:
    """Builds the description of a run's training step from which it is compiled; no array is created, nothing compiled.

    Durations in epochs are converted with `EPOCH` steps per epoch.

    Raises:
      UsageError: the settings are invalid, or the model does not accept such batches.
    """
    check(config)
    plan = plan_precision(config.precision)

    def steps(duration: Duration) -> int:
        return duration.in_steps(config.data.batch_size, EPOCH)

    with x64_if_float64(plan):
        warmup = steps(config.optimizer.warmup)
        learner = make_learner(config, plan, fields, steps=steps(config.steps), warmup=warmup)
        make = functools.partial(make_state, learner.task, learner.tx, ema=config.training.ema > 0)
        state = jax.eval_shape(make, jax.random.key(config.seed), {})
    size = config.data.batch_size
    oriented = {}
    if config.data.alternate_flips:
        oriented = orientation_of(config.data, fields, config.seed).of(np.arange(size), 0)
    batch = batch_shapes(fields, size) | jax.eval_shape(lambda: oriented)
    return PlannedStep(
        config.precision.policy,
        plan,
        learner.task,
        learner.tx,
        learner.on,
        state,
        batch,
        accumulate=config.training.accumulate,
        sizes=config.mesh.sizes,
        overlap=config.mesh.overlap,
        recomputes=config.training.remat == "full",
        sequence=config.mesh.sequence,
    )


def _described(plan: Estimate) -> dict[str, Any]:
    return {
        **dataclasses.asdict(dataclasses.replace(plan, receipt=None)),
        "receipt": None if plan.receipt is None else plan.receipt.as_json(),
        "device": GPUS[plan.gpu].name,
        "memory": {**dataclasses.asdict(plan.memory), "total": plan.memory.total},
        "fits": plan.fits,
        "roofline": {
            **dataclasses.asdict(plan.roofline),
            "seconds": plan.roofline.seconds,
            "serial": plan.roofline.serial,
            "bound": plan.roofline.bound,
        },
        "items_per_second": plan.items_per_second,
        "expected_seconds": plan.expected_seconds,
        "utilisation": plan.utilisation,
    }


def _print(settings: Plan, plans: list[Estimate]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)

    def say(text: str) -> None:
        console.print(text, markup=False, emoji=False, soft_wrap=True)

    for gpu in settings.gpu:
        estimates = [plan for plan in plans if plan.gpu == gpu]
        say(title(estimates))
        console.print(plan_table(estimates))
        say("")
        for line in comparisons(estimates):
            say(line)
        if any(plan.float8 for plan in estimates):
            say("")
        if estimates[-1].costliest:
            say(f"the kernels that move the most, with {estimates[-1].title}")
            console.print(costliest_table(estimates[-1]))
            say("")
        for plan in estimates:
            if plan.receipt is not None:
                say(f"what runs, with {plan.title}\n{plan.receipt}\n")
        if settings.devices > 1:
            say(scaling_title(estimates))
            if estimates[0].communication.scaling:
                console.print(scaling_table(estimates))
            say("")
    say(LEFT_OUT)
    if settings.devices > 1:
        say(SCALING)
    if settings.plot:
        say(f"plot: {settings.plot}")
