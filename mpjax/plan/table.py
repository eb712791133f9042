"""Formats plans as text: one table per kind of GPU, one column per policy; and whether float8 products pay off."""

import pathlib
import shlex
from collections.abc import Callable, Sequence

from mpjax.plan.devices import GPUS
from mpjax.plan.estimate import Estimate
from mpjax.plan.expectation import Expected
from mpjax.plan.links import Sent
from mpjax.plan.roofline import COPIES, LAUNCH, PRODUCTS
from mpjax.plan.timeline import StepTime
from mpjax.precision.casting.flops import TENSORFLOAT32
from mpjax.precision.dtypes import FLOAT32
from mpjax.precision.presets import get_policy
from mpjax.report.wording import rate


_NOTICED = 1e6  # bytes
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))


def title(plans: Sequence[Estimate]) -> str:
    """Formats the title of a table: the first plan's GPU, batch, memory limit, bandwidth and peak rate in float16."""
    first, gpu = plans[0], GPUS[plans[0].gpu]
    devices = f" over {first.devices} GPUs" if first.devices > 1 else ""
    return (
        f"{gpu.name}: {first.batch} examples a step{devices}; {size(first.limit)} of {size(gpu.memory)} for the run, "
        f"{gpu.bandwidth / 1e9:.0f} GB/s, {gpu.rate('float16') / 1e12:.0f} TFLOP/s in float16"
    )


def plan_table(plans: Sequence[Estimate]):
    """Builds a rich table of the plans for one kind of GPU, with one column per policy."""
    return columns("per step and GPU", plans, rows(plans))


def columns(header: str, plans: Sequence[Estimate], lines: Sequence[tuple[str, list[str]]]):
    """Builds a rich table with one column per policy.

    Args:
      header: the title of the first column.
      plans: the plans, one per column.
      lines: the label and cells of each row.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column(header, no_wrap=True)
    for plan in plans:
        table.add_column(plan.title, justify="right", overflow="fold")
    for label, cells in lines:
        table.add_row(label, *cells)
    return table


def costliest_table(plan: Estimate):
    """Builds a rich table of a plan's costliest kernels, with one kind per row and the fraction of all traffic."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for name in ("traffic", "share", "kernels"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kind", "module", "source line"):
        table.add_column(name, overflow="fold")
    for cost in plan.costliest:
        where = " ".join(word for word in (cost.module, "backward" if cost.backward else "") if word)
        fraction = f"{cost.bytes / plan.traffic.bytes:.1%}"
        table.add_row(size(cost.bytes), fraction, str(cost.kernels), cost.kind.strip("_"), where, _short(cost.line))
    return table


def rows(plans: Sequence[Estimate]) -> list[tuple[str, list[str]]]:
    """Builds the rows of a plan table: the label, and a cell for each plan. Rows with empty cells only are left out."""
    lines = [(label, [text(plan) for plan in plans]) for label, text in [*_ROWS, *_collectives(plans), *_ENDS]]
    return [(label, cells) for label, cells in lines if any(cells)]


def size(count: float) -> str:
    """Formats a number of bytes to three digits with an SI prefix.

    >>> size(11_300_000_000)
    '11.3 GB'
    """
    return _scaled(count, "B")


def duration(seconds: float) -> str:
    """Formats seconds to three digits with an SI prefix; there are no minutes or hours.

    >>> duration(0.0238), duration(0.9996), duration(7200)
    ('23.8 ms', '1 s', '7.2 ks')
    """
    return _scaled(seconds, "s")


def _scaled(value: float, unit: str) -> str:
    """Formats a value to three digits, with the unit and an SI prefix from n to T: 0.0238 and "s" give "23.8 ms"."""
    rounded = float(f"{value:.3g}")  # 999.7 is 1 k
    prefix, factor = next(((p, f) for p, f in _PREFIXES if abs(rounded) >= f), _PREFIXES[-1] if value else ("", 1))
    return f"{rounded / factor:.3g} {prefix}{unit}"


def _optional_size(count: int) -> str:
    return size(count) if count else ""


def _short(line: str) -> str:
    """Shortens the file of `file:line` to its path below the working directory or site-packages; others stay."""
    for folder in (f"{pathlib.Path.cwd()}/", "site-packages/"):
        line = line.rpartition(folder)[2]
    return line


def _dtypes(plan: Estimate) -> str:
    short = {TENSORFLOAT32: "tf32" if TENSORFLOAT32 in GPUS[plan.gpu].flops else "float32"}
    total = sum(plan.flops.values()) or 1
    descending = sorted(plan.flops.items(), key=lambda item: -item[1])
    return ", ".join(f"{short.get(dtype, dtype)} {count / total:.0%}" for dtype, count in descending)


def _largest(plan: Estimate) -> str:
    if plan.fit is None:
        return ""
    return f"{plan.fit.batch}{'' if plan.fit.compiled else ' (estimated)'}"


def _tokens(plan: Estimate, seconds: float) -> str:
    return rate(plan.batch * plan.tokens / seconds) if plan.tokens else ""


def _measured(plan: Estimate) -> str:
    if plan.measured is None:
        return ""
    fraction = plan.roofline.seconds / plan.measured.seconds
    return f"{duration(plan.measured.seconds)} ({fraction:.0%} of the roofline)"


def _measured_peak(plan: Estimate) -> str:
    if plan.measured is None or plan.measured.peak is None:
        return ""
    return f"{size(plan.measured.peak)} (planned {plan.memory.total / plan.measured.peak - 1:+.0%})"


def _with_communication(text: Callable[[Estimate, StepTime], str]) -> "Text":
    """Wraps `text`, a function `(plan, timing) -> cell`, into a function `(plan) -> cell`.

    The cell is empty if the devices exchange nothing, or if the network between hosts is unknown.
    """

    def shown(plan: Estimate) -> str:
        timing = plan.communication.timing
        return text(plan, timing) if timing and plan.communication.bytes else ""

    return shown


def _to_expect(text: Callable[[Estimate, Expected], str]) -> "Text":
    """Wraps `text`, a function `(plan, expected) -> cell`, so that the cell is empty without exchanges."""

    def shown(plan: Estimate) -> str:
        expected = plan.communication.expected
        return text(plan, expected) if expected and plan.communication.bytes else ""

    return shown


def _sent(count: Callable[[Sent], int]) -> "Text":
    """Wraps `count`, a function from what a GPU sends to bytes of one link, into a function `(plan) -> cell`."""

    def shown(plan: Estimate) -> str:
        sent = plan.communication.sent
        return size(count(sent)) if sent and plan.communication.bytes else ""

    return shown


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
    ("  that move under 4 MB", lambda plan: str(plan.traffic.small)),
    ("attention by", lambda plan: plan.attention),
    ("time of arithmetic", lambda plan: duration(plan.roofline.compute)),
    ("time of traffic", lambda plan: duration(plan.roofline.traffic)),
    ("bound by", lambda plan: plan.roofline.bound),
]

_ENDS: list[tuple[str, Text]] = [
    ("examples/s at best", lambda plan: rate(plan.items_per_second)),
    ("  without overlap", lambda plan: rate(plan.batch / plan.roofline.serial)),
    ("  to expect", lambda plan: rate(plan.batch / plan.expected_seconds)),
    ("  with communication", _with_communication(lambda plan, timing: rate(plan.batch / timing.step))),
    ("tokens/s to expect", lambda plan: _tokens(plan, plan.expected_seconds)),
    ("MFU to expect", lambda plan: "" if plan.recomputes else f"{plan.utilisation:.1%}"),
    ("HFU to expect", lambda plan: f"{plan.utilisation:.1%}" if plan.recomputes else ""),
    ("measured step", _measured),
    ("measured examples/s", lambda plan: rate(plan.batch / plan.measured.seconds) if plan.measured else ""),
    ("measured tokens/s", lambda plan: _tokens(plan, plan.measured.seconds) if plan.measured else ""),
    ("measured peak memory", _measured_peak),
]


def _collectives(plans: Sequence[Estimate]) -> list[tuple[str, Text]]:
    """Builds the rows for the bytes by collective, dtype and mesh axes, of all plans, and for the time of all together.

    A row is its label and a function `(plan) -> cell`, which is empty for a plan without that collective.
    """
    exchanged = [_exchanged(plan) for plan in plans]

    def cell(key: tuple[str, str, str]) -> Text:
        return lambda plan: _optional_size(_exchanged(plan).get(key, 0))

    return [
        *((f"{key[0]} {key[1]}, {key[2]}", cell(key)) for key in sorted(set().union(*exchanged))),
        ("  while kernels run", lambda plan: f"{plan.overlap:.0%}" if plan.communication.bytes else ""),
        ("time of communication", _with_communication(lambda _, timing: duration(timing.communication))),
        ("  exposed", _with_communication(lambda _, timing: duration(timing.exposed))),
        ("expected step", _with_communication(lambda _, timing: duration(timing.step))),
        ("step to expect", _to_expect(lambda plan, _: duration(plan.expected_seconds))),
        ("  all hidden", _to_expect(lambda _, expected: duration(expected.all_hidden))),
        ("  none hidden", _to_expect(lambda _, expected: duration(expected.none_hidden))),
        ("  efficiency against one host", _to_expect(lambda _, expected: f"{expected.efficiency:.1%}")),
        ("sent by each GPU, in its host", _sent(lambda sent: sent.within)),
        ("  to other hosts", _sent(lambda sent: sent.between)),
    ]


def _exchanged(plan: Estimate) -> dict[tuple[str, str, str], int]:
    """The bytes that the devices of a plan exchange, by (collective, dtype, axes)."""
    return {
        (kind, dtype, axes): size
        for kind, by_dtype in plan.communication.bytes.items()
        for dtype, by_axes in by_dtype.items()
        for axes, size in by_axes.items()
    }


def comparisons(plans: Sequence[Estimate]) -> list[str]:
    """Compares each plan with float8 to the plans without, a line for each, and lists the layers where float8 loses.

    Compared plans have the same kind and number of GPUs, options of XLA and compute dtype. If there is no such plan
    without float8, the line names the flag that adds one. The list is empty if no plan has float8 products.
    """
    lines = []
    for plan in (plan for plan in plans if plan.float8):
        others = [other for other in plans if _is_without(other, plan)]
        for other in others:
            lines += [_compared(plan, other), *_losing(plan)]
        if not others:
            without = "float32" if get_policy(plan.policy).compute_dtype == FLOAT32 else "mixed_bfloat16"
            lines.append(f"to see what float8 saves in {plan.title}: --policies {without} {shlex.quote(plan.policy)}")
    return lines


def _is_without(other: Estimate, plan: Estimate) -> bool:
    policy, other_policy = get_policy(plan.policy), get_policy(other.policy)
    same = (other.gpu, other.xla, other.devices) == (plan.gpu, plan.xla, plan.devices)
    return same and not other_policy.recipes and policy.compute_dtype == other_policy.compute_dtype


def _compared(plan: Estimate, other: Estimate) -> str:
    """Compares the expected times of a plan with float8 and a plan without, in a line with the reasons."""
    ratio = plan.expected_seconds / other.expected_seconds
    differences = {
        "products": (plan.roofline.compute - other.roofline.compute) / PRODUCTS,
        "traffic": (plan.roofline.traffic - other.roofline.traffic) / COPIES,
        "launches": (plan.traffic.kernels - other.traffic.kernels) * LAUNCH,
    }
    told = ", ".join(f"{name} {_signed(seconds)}" for name, seconds in differences.items())
    verdict = "may win" if ratio <= 0.9 else "gains little" if ratio < 1 else "loses"
    memory = (plan.memory.temporary - other.memory.temporary) / 1e9
    return (
        f"{plan.title} {verdict}: its step is expected to take {ratio:.2f} of the time of {other.title}. "
        f"At full rates: {told}. "
        f"Temporary memory {memory:+.2f} GB. "
        "The one step that was timed, GPT-2 small on an H200, took 1.08 of bfloat16's time where 0.89 was expected "
        "(docs/float8.md): time yours."
    )


def _signed(seconds: float) -> str:
    return f"{1e3 * seconds:+.2f} ms"


def _losing(plan: Estimate) -> list[str]:
    """Formats a line for each kind of layer in which float8 costs more than it saves; an empty list if there is none.

    The first line has the setting that leaves float8 out in these layers.
    """
    losing = [layer for layer in plan.float8 if layer.spent > layer.saved]
    if not losing:
        return []
    told = (
        f'  "{layer.module}": products save {1e6 * layer.saved:.0f} us, {layer.kernels} kernels of conversion take at '
        f"most {1e6 * layer.spent:.0f} us"
        for layer in losing
    )
    rules = " ".join(f'"{layer.module}" {get_policy(plan.policy).compute_dtype}' for layer in losing)
    head = f"float8 may not pay in {len(losing)} of {len(plan.float8)} kinds of layers"
    return [f"{head}; without it there: --precision.rules {rules}", *told]
