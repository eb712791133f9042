"""Formats plans as text: one table per kind of GPU, one column per policy."""

from collections.abc import Callable, Sequence

from mpjax.plan.communication import Communication
from mpjax.plan.devices import GPUS, HOST
from mpjax.plan.estimate import Estimate
from mpjax.plan.timeline import Timing
from mpjax.precision.casting.flops import TENSORFLOAT32


_NOTICED = 1e6  # bytes
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))


def title(plans: Sequence[Estimate]) -> str:
    """Returns the title of a table: the GPU with its rates, the batch and the memory limit."""
    first, gpu = plans[0], GPUS[plans[0].gpu]
    share = f" over {first.devices} GPUs" if first.devices > 1 else ""
    return (
        f"{gpu.name}: {first.batch} examples a step{share}; {size(first.limit)} of {size(gpu.memory)} for the run, "
        f"{gpu.bandwidth / 1e9:.0f} GB/s, {gpu.rate('float16') / 1e12:.0f} TFLOP/s in float16"
    )


def plan_table(plans: Sequence[Estimate]):
    """Builds a rich table of the plans for one kind of GPU, with one column per policy."""
    return _table("per step and GPU", plans, rows(plans))


def scaling_table(plans: Sequence[Estimate]):
    """Builds a rich table of the time of a step and its efficiency by number of GPUs, with one column per policy."""
    return _table("GPUs", plans, scaling_rows(plans))


def _table(header: str, plans: Sequence[Estimate], lines: Sequence[tuple[str, list[str]]]):
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column(header, no_wrap=True)
    for plan in plans:
        table.add_column(plan.policy, justify="right", overflow="fold")
    for label, cells in lines:
        table.add_row(label, *cells)
    return table


def rows(plans: Sequence[Estimate]) -> list[tuple[str, list[str]]]:
    """Returns the label and cells of each row. Rows without any content are left out."""
    found = [(label, [text(plan) for plan in plans]) for label, text in [*_ROWS, *_collectives(plans), *_ENDS]]
    return [(label, cells) for label, cells in found if any(cells)]


def scaling_title(plan: Estimate, communication: Communication) -> str:
    """Returns the title of a scaling table, or what to write instead if there is nothing to show in one."""
    gpu, axis = GPUS[plan.gpu], f"--mesh.{communication.grows}"
    if not communication.scaling:
        return (
            f"{axis} is 1 here, so the program says nothing about more: for scaling, plan --devices {2 * plan.devices}"
        )
    between = f", {gpu.network / 1e9:g} GB/s per GPU between hosts" if gpu.network else "; no network is known"
    return (
        f"expected step and efficiency by number of GPUs: {plan.batch / plan.devices:g} examples on each, {axis} grows; "
        f"{gpu.link / 1e9:g} GB/s within a host of {HOST}{between}"
    )


def scaling_rows(plans: Sequence[Estimate]) -> list[tuple[str, list[str]]]:
    """Returns the number of GPUs of each row, and each policy's time of a step and efficiency."""
    found: dict[int, list[str]] = {}
    for plan in plans:
        for scale in plan.communication.scaling if plan.communication else ():
            cell = f"{duration(scale.timing.step)} {scale.efficiency:4.0%}"
            found.setdefault(scale.devices, []).append(cell)
    return [(str(devices), cells) for devices, cells in found.items()]


def size(count: float) -> str:
    """Formats a number of bytes.

    >>> size(11_300_000_000)
    '11.3 GB'
    """
    return _scaled(count, "B")


def duration(seconds: float) -> str:
    """Formats a time.

    >>> duration(0.0238)
    '23.8 ms'
    """
    return _scaled(seconds, "s")


def _scaled(value: float, unit: str) -> str:
    """Formats a value to three digits, with a prefixed unit."""
    prefix, factor = next(((p, f) for p, f in _PREFIXES if abs(value) >= f), _PREFIXES[-1] if value else ("", 1))
    return f"{value / factor:.3g} {prefix}{unit}"


def _optional_size(count: int) -> str:
    return size(count) if count else ""


def _dtypes(plan: Estimate) -> str:
    short = {TENSORFLOAT32: "tf32" if TENSORFLOAT32 in GPUS[plan.gpu].flops else "float32"}
    total = sum(plan.flops.values()) or 1
    shares = sorted(plan.flops.items(), key=lambda item: -item[1])
    return ", ".join(f"{short.get(dtype, dtype)} {count / total:.0%}" for dtype, count in shares)


def _largest(plan: Estimate) -> str:
    if plan.fit is None:
        return ""
    return f"{plan.fit.batch}{'' if plan.fit.compiled else ' (estimated)'}"


def _measured(plan: Estimate) -> str:
    if plan.measured is None:
        return ""
    share = plan.roofline.seconds / plan.measured.seconds
    return f"{duration(plan.measured.seconds)} ({share:.0%} of the roofline)"


def _measured_peak(plan: Estimate) -> str:
    if plan.measured is None or plan.measured.peak is None:
        return ""
    return f"{size(plan.measured.peak)} (planned {plan.memory.total / plan.measured.peak - 1:+.0%})"


def _timed(text: Callable[[Timing], str]) -> "Text":
    """Returns the text of a plan's timing; empty without communication, or if the network is not known."""
    return lambda plan: text(plan.communication.timing) if plan.communication and plan.communication.timing else ""


Text = Callable[[Estimate], str]

_ROWS: list[tuple[str, Text]] = [
    ("memory: parameters", lambda plan: size(plan.memory.parameters)),
    ("  optimizer state", lambda plan: size(plan.memory.optimizer)),
    ("  statistics, average", lambda plan: _optional_size(plan.memory.statistics)),
    ("  batch", lambda plan: size(plan.memory.batch)),
    ("  temporary", lambda plan: size(plan.memory.temporary)),
    ("  other outputs", lambda plan: size(plan.memory.extra) if plan.memory.extra > _NOTICED else ""),
    ("  total at the peak", lambda plan: size(plan.memory.total)),
    ("  does it fit?", lambda plan: "yes" if plan.fits else "no"),
    ("largest batch that fits", _largest),
    ("arithmetic", lambda plan: _scaled(sum(plan.flops.values()), "FLOP")),
    ("  in", _dtypes),
    ("traffic", lambda plan: size(plan.traffic.bytes)),
    ("  by copy kernels", lambda plan: size(plan.traffic.copies)),
    ("kernels", lambda plan: str(plan.traffic.kernels)),
    ("attention by", lambda plan: plan.attention),
    ("time of arithmetic", lambda plan: duration(plan.roofline.compute)),
    ("time of traffic", lambda plan: duration(plan.roofline.traffic)),
    ("bound by", lambda plan: plan.roofline.bound),
]

_ENDS: list[tuple[str, Text]] = [
    ("examples/s at best", lambda plan: f"{plan.items_per_second:.0f}"),
    ("  without overlap", lambda plan: f"{plan.batch / plan.roofline.serial:.0f}"),
    ("  with communication", lambda plan: _timed(lambda timing: f"{plan.batch / timing.step:.0f}")(plan)),
    ("measured step", _measured),
    ("measured examples/s", lambda plan: f"{plan.batch / plan.measured.seconds:.0f}" if plan.measured else ""),
    ("measured peak memory", _measured_peak),
]


def _collectives(plans: Sequence[Estimate]) -> list[tuple[str, Text]]:
    """Returns a row for each collective, dtype and axes of the mesh, and the rows of their time."""
    kinds = sorted(
        {
            (kind, dtype, axes)
            for plan in plans
            for kind, by_dtype in (plan.communication.bytes.items() if plan.communication else ())
            for dtype, by_axes in by_dtype.items()
            for axes in by_axes
        }
    )

    def cell(kind: str, dtype: str, axes: str) -> Text:
        return lambda plan: (
            _optional_size(plan.communication.bytes.get(kind, {}).get(dtype, {}).get(axes, 0))
            if plan.communication
            else ""
        )

    def hidden(plan: Estimate) -> str:
        return f"{plan.overlap:.0%}" if plan.traffic.collectives else ""

    return [
        *((f"{kind} {dtype}, {axes}", cell(kind, dtype, axes)) for kind, dtype, axes in kinds),
        ("  while kernels run", hidden),
        ("time of communication", _timed(lambda timing: duration(timing.communication))),
        ("  exposed", _timed(lambda timing: duration(timing.exposed))),
        ("expected step", _timed(lambda timing: duration(timing.step))),
    ]
