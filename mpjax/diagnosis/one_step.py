"""Diagnoses one training step: compares it under a policy with float32, and searches for a repair."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np
import optax

from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.finding import Finding
from mpjax.diagnosis.health import ROUNDING, WITHOUT_ROUNDING, Reference, all_finite, flushed_fraction, outputs_of
from mpjax.diagnosis.program import Program, program_of_function, program_of_model
from mpjax.diagnosis.progress import SILENT, Progress, progress_at
from mpjax.diagnosis.readings import Site
from mpjax.diagnosis.render.text import percent
from mpjax.diagnosis.repair import Fault, is_repaired_at, is_repaired_outside, smallest_rules, with_lower_scale
from mpjax.diagnosis.search import covers
from mpjax.diagnosis.trace import Trace, TraceRow, emulated, table_of
from mpjax.diagnosis.update import UpdateRule, lost_update, updates_of
from mpjax.diagnosis.verdict import find
from mpjax.errors import UsageError
from mpjax.precision.casting.one_equation import LIBRARIES, NO_SOURCE
from mpjax.precision.dtypes import HALF
from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.modules import apply_policy
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy
from mpjax.precision.rules import without_class


def diagnose(
    model,
    loss_fn: Callable,
    batch,
    *,
    policy: "str | Policy" = "mixed_float16",
    loss_scale: float = 1.0,
    tolerance: float = 0.05,
    search: bool = True,
    tx: optax.GradientTransformation | None = None,
    opt_state=None,
) -> Diagnosis:
    """Runs one training step of a Flax NNX model under a policy and in float32, and explains the differences.

    A progress bar appears on a terminal if the diagnosis takes more than a second. Nothing is trained or written.

    Args:
      model: an NNX module, in training or evaluation mode. It is not modified. Its own dtypes do not matter.
      loss_fn: `loss_fn(model, batch)`; returns a scalar, or a pair of the scalar and auxiliary values, which are
        ignored.
      batch: a pytree of arrays.
      policy: the policy to diagnose: a `Policy` or an argument of `get_policy`.
      loss_scale: the factor that multiplies the loss before differentiation.
      tolerance: the largest relative error of the loss, and the largest fraction of a gradient's norm that underflows
        to zero, in a healthy step.
      search: True to search for the smallest set of modules to keep in float32, and to verify it; False for no rules.
      tx: the optimizer, to also check its update if the step is healthy: in half precision it may be too small to
        change the parameters. None checks no update.
      opt_state: the optimizer's state for `nnx.state(model, nnx.Param)`; None for a fresh `tx.init`.

    Returns:
      A `Diagnosis`, which prints as text. Its main fields are `verdict`, `path` (the module at fault), `rules` (to add
      to the policy) and `verified`.

    Raises:
      UsageError: the policy is unknown or has neither half precision nor float8, the model is not an NNX module, the
        loss is not a floating scalar, `loss_scale` or `tolerance` is not positive and finite, or `opt_state` is given
        without `tx`.
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise UsageError(
            f"diagnose takes a Flax NNX module, got {type(model).__name__}; for a function of parameters use "
            "mpjax.diagnosis.diagnose_function"
        )
    make, policy, optimizer = functools.partial(program_of_model, model, loss_fn, batch), _with_half(policy), None
    if tx is None and opt_state is not None:
        raise UsageError("diagnose got opt_state without tx: give the optimizer too, as tx=")
    if tx is not None:
        stored = nnx.clone(model)
        apply_policy(stored, policy)
        params = nnx.state(stored, nnx.Param)
        optimizer = UpdateRule(tx, params, tx.init(params) if opt_state is None else opt_state)
    with progress_at() as progress:
        return diagnose_program(make, policy, loss_scale, tolerance, search, progress, optimizer)


def diagnose_function(
    loss_fn: Callable,
    params,
    batch,
    *,
    policy: "str | Policy" = "mixed_float16",
    loss_scale: float = 1.0,
    tolerance: float = 0.05,
    search: bool = True,
) -> Diagnosis:
    """Diagnoses a function of parameters and batch under autocast, for Flax linen, Haiku, Equinox or your own code.

    Args:
      loss_fn: `loss_fn(params, batch)`; returns a scalar, or a pair of the scalar and auxiliary values, which are
        ignored. Its named scopes are the module paths. Linen and Haiku open them; an Equinox module has its own paths.
      params: a pytree, for example an Equinox module. The loss is differentiated with respect to its floating arrays.
      batch: a pytree, not differentiated.
      policy: as in `diagnose`; `autocast` inserts its casts.
      loss_scale: as in `diagnose`.
      tolerance: as in `diagnose`.
      search: as in `diagnose`.

    Returns:
      A `Diagnosis`, as in `diagnose`.

    Raises:
      UsageError: the policy is unknown or has neither half precision nor float8, the loss is not a floating scalar, or
        `loss_scale` or `tolerance` is not positive and finite.
    """
    make = functools.partial(program_of_function, loss_fn, params, batch)
    with progress_at() as progress:
        return diagnose_program(make, _with_half(policy), loss_scale, tolerance, search, progress)


def _with_half(spec: "str | Policy") -> Policy:
    """Parses a policy, as `get_policy`; raises UsageError if it has neither half precision nor float8."""
    policy = get_policy(spec)
    rules = map(policy.computes, policy.rules.values())
    if not policy.recipes and not set(HALF) & {policy.compute_dtype, policy.param_dtype, *rules}:
        raise UsageError(f"policy {policy} has no half precision: wanted one such as mixed_float16")
    return policy


@np.errstate(all="ignore")  # the diagnosis reports constants outside the range of half precision
def diagnose_program(
    make: Callable[[Policy], Program],
    policy: Policy,
    scale: float,
    tolerance: float,
    search: bool,
    progress: Progress = SILENT,
    optimizer: UpdateRule | None = None,
) -> Diagnosis:
    """Diagnoses the program that `make` returns for a policy. Unlike in `diagnose`, the policy may be float32.

    Args:
      make: a function from policy to the step's program; called for `policy`, for float32, and for each policy of the
        search.
      policy: the policy to diagnose.
      scale: the loss scale.
      tolerance: as in `diagnose`.
      search: as in `diagnose`.
      progress: receives the progress; the default shows none.
      optimizer: the optimizer whose update is checked too if the step is healthy; None to check none.

    Raises:
      UsageError: `scale` or `tolerance` is not positive and finite.
    """
    check_numbers(tolerance=tolerance, loss_scale=scale)
    full = make(get_policy("float32"))
    program = make(policy).beside(full)._replace(progress=progress)
    known = program if program.constants.complete else full
    del full  # frees its copy of the parameters, unless it is `known`
    trace = emulated(program, scale)
    if known is not program:
        trace = trace._replace(wide=outputs_of(WITHOUT_ROUNDING, known, scale))
    outputs = [np.asarray(x) / scale for x in trace.wide]
    wider = functools.partial(without_float8, make, policy, scale) if policy.recipes else None
    same_numbers = known is program or not program.is_random
    reference = Reference(known, outputs, tolerance, wider, same_numbers=same_numbers)
    finding = find(program, trace, scale, reference)
    reference = dataclasses.replace(reference, accepts=finding.accepts)
    updates = updates_of(program, trace, scale, optimizer) if optimizer and all_finite(trace.wide + trace.low) else []
    if finding.verdict == "healthy":
        finding = lost_update(updates, tolerance) or finding
    in_update = finding.site is not None and finding.site.direction == "update"
    alone = emulated(program, scale, isolated=True) if finding.verdict not in ("healthy", "not_precision") else None
    rules, searched = {}, search and not in_update and finding.verdict in ("overflow", "underflow", "rounding")
    if searched and finding.better_scale is None:
        fault = Fault(make, policy, program, trace, scale, reference)
        finding, rules = with_lower_scale(finding, smallest_rules(fault), fault)
    unrepaired = searched and not rules and finding.better_scale is None
    outside = unrepaired and is_repaired_outside(program, scale, reference)
    covered, in_float32 = _covered_fraction(program, rules), float32_fraction(program, rules)
    site, table = finding.site, table_of(trace, alone)
    line = _cheaper_line(finding, program, scale, reference, in_float32) if rules else None
    return Diagnosis(
        verdict=finding.verdict,
        path=_module(site.path) if site else None,
        direction=site.direction if site else None,
        operation=site.operation if site else None,
        source=site.source if site else None,
        evidence=" ".join([finding.evidence, *_in_the_table(finding, table), *_called(site, trace)]),
        rules=rules,
        better_scale=finding.better_scale,
        verified=bool(rules) or finding.better_scale is not None or in_update,
        float32_flops=in_float32,
        advice=(*_advice(finding, rules, covered, searched=searched, outside=outside), *filter(None, [line])),
        table=(*table, *(update.row for update in updates)),
        policy=str(policy),
        loss_scale=float(scale),
        loss=(float(trace.low[0]) / scale, float(trace.wide[0]) / scale),
        flushed=_flushed(program, trace),
        reason=finding.reason,
    )


def without_float8(make: Callable[[Policy], Program], policy: Policy, scale: float) -> list[np.ndarray]:
    """Emulates a step with the policy's compute dtype in place of float8.

    Returns the loss and the gradients, without the loss scale.
    """
    kept = {pattern: value for pattern, value in policy.rules.items() if not isinstance(value, Recipe)}
    program = make(dataclasses.replace(policy, products=None, rules=kept))
    return [x / scale for x in outputs_of(ROUNDING, program, scale)]


def _module(path: str) -> str:
    """Strips the scopes of einsums and of Equinox classes from a module path."""
    return "/".join(scope for scope in without_class(path).split("/") if "->" not in scope)


def _in_the_table(finding: Finding, table: Iterable[TraceRow]) -> Iterator[str]:
    """Yields a sentence with the fraction of the module's results that overflow or underflow, as in the table's row.

    The evidence has the fraction of one operation only. Yields nothing for other verdicts, or if the fraction is 0.
    """
    site, faults = finding.site, {"overflow": "overflow", "loss_scale": "overflow", "underflow": "underflow"}
    if site is None or finding.verdict not in faults:
        return
    name = faults[finding.verdict]
    for row in table:
        if (row.path, row.direction) == (site.path, site.direction) and (fraction := getattr(row, name)):
            whole = f"{_module(site.path) or 'no module'} ({site.direction})"
            lost = f"{percent(fraction)} % {name}" + " to zero" * (name == "underflow")
            yield f"Of all half-precision results of {whole}, {lost}: this share is in the table."


def _called(site: Site | None, trace: Trace) -> Iterator[str]:
    """Yields a sentence with the caller of a site's source line, if other sites on that line have other callers.

    Yields nothing without a site, or if the caller is not known.
    """
    if site is not None and site.caller and {s.caller for s in trace.sites if s.source == site.source} != {site.caller}:
        yield f"That line is called from several places, here from {site.caller}."


def _cheaper_line(
    finding: Finding, program: Program, scale: float, reference: Reference, fraction: float
) -> str | None:
    """Advises float32 for one line of the user's code, if it repairs the step and moves at most half of `fraction`.

    `fraction` is the fraction of the FLOPs that the rules move to float32. Returns None if the line does not repair the
    step or moves more FLOPs, for a line of a library, and if `fraction` is below `_CHEAP`: then nothing is tried.
    """
    source = finding.site.source if finding.site else NO_SOURCE
    if fraction < _CHEAP or source == NO_SOURCE or any(library in source for library in LIBRARIES):
        return None
    total, flops = sum(program.flops().values()), program.flops_at(source)
    if 2 * flops > fraction * total or not is_repaired_at(source, program, finding.better_scale or scale, reference):
        return None
    return (
        f"Cheaper: only this line in float32, {source}. Call .astype(jnp.float32) on the values that it reads and cast "
        f"its result back ({flops / total:.1%} of the FLOPs, verified by running)."
    )


_CHEAP = 0.01
"""The fraction of the FLOPs that rules move to float32, from which a cheaper way is tried."""


def float32_fraction(program: Program, rules: Mapping[str, str]) -> float:
    """The fraction of the step's FLOPs that rules move to float32: those in modules with a rule "float32".

    FLOPs are counted as in `Program.flops`. The fraction is 0 if the step has none.
    """
    return _covered_fraction(program, [pattern for pattern, dtype in rules.items() if dtype == "float32"])


def _covered_fraction(program: Program, patterns: Collection[str]) -> float:
    """The fraction of the step's FLOPs in the modules that rules cover, whatever their dtype; 0 without FLOPs."""
    flops = program.flops()
    covered = sum(n for path, n in flops.items() if covers(patterns, path))
    return covered / sum(flops.values()) if flops else 0.0


def _flushed(program: Program, trace: Trace) -> dict[str, float]:
    """The fraction of each gradient's values that are zero in half precision but not in float32, by parameter."""
    pairs = zip(program.gradients, trace.wide[1:], trace.low[1:], strict=True)
    return {name: flushed_fraction(wide, low) for name, wide, low in pairs}


def _advice(
    finding: Finding, rules: Mapping[str, str], fraction: float, *, searched: bool, outside: bool
) -> Iterator[str]:
    """Yields the recommended change: one line, or none if there is nothing to recommend.

    Args:
      finding: the fault.
      rules: the rules that repair the step; empty if there are none.
      fraction: the fraction of the FLOPs in the modules of `rules`.
      searched: True if rules were searched for, so that their absence is worth a line.
      outside: True if float32 outside of all modules repairs the step.
    """
    if finding.site is not None and finding.site.direction == "update":
        yield (
            "Keep float32 master weights, with mpjax.master_weights(optimizer) or --precision.master_weights on, or "
            "store the parameters in float32. Then the update is not lost (verified by running). With less memory, "
            "--precision.master_weights stochastic or kahan keep it too."
        )
    elif finding.better_scale is not None and rules:
        yield (
            f"{_kept(rules)}: {_lines(rules)} ({fraction:.1%} of the FLOPs). Set the loss scale to "
            f"{finding.better_scale:g} (both verified together by running), {_OR_DYNAMIC}"
        )
    elif finding.better_scale is not None:
        yield f"Set the loss scale to {finding.better_scale:g} (verified by running), {_OR_DYNAMIC}"
    elif rules:
        yield f"{_kept(rules)}: {_lines(rules)} ({fraction:.1%} of the FLOPs, verified by running)."
    elif outside:
        location = f"at {finding.site.source}" if finding.site else "such as the loss"
        yield (
            f"Compute in float32 outside of all modules, {location}. No rule applies there: call .astype(jnp.float32) "
            "on the inputs of that code. With all of it in float32 the step is healthy (emulated)."
        )
    elif searched:
        yield "No set of modules in float32 repairs the step."


_OR_DYNAMIC = "or use mpjax.dynamic_loss_scaling(optimizer) (--precision.loss_scale dynamic), which finds a scale."


def _kept(rules: Mapping[str, str]) -> str:
    """The first words of advice on rules: whether they keep modules in float32, or only out of float8."""
    return "Keep in float32" if "float32" in rules.values() else "Keep out of float8"


def _lines(rules: Mapping[str, str]) -> str:
    return ", ".join(f'"{path}" = "{dtype}"' for path, dtype in rules.items())


def check_numbers(**numbers: float) -> None:
    """Raises UsageError for the first number that is not positive and finite; the message has its keyword."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}: wanted a positive number")
