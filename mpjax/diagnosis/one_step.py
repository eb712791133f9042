"""Is precision to blame? One step under a policy and in float32, where they part, and what repairs it."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import optax

from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.health import WITHOUT_ROUNDING, Reference, all_finite, flushed_share, outputs_of
from mpjax.diagnosis.program import Program, program_of_function, program_of_model
from mpjax.diagnosis.progress import SILENT, Progress, progress_at
from mpjax.diagnosis.repair import Fault, is_repaired_outside, smallest_rules, with_lower_scale
from mpjax.diagnosis.search import covers
from mpjax.diagnosis.trace import Trace, run, table_of
from mpjax.diagnosis.update import Optimizer, lost_update, updates_of
from mpjax.diagnosis.verdict import Finding, find
from mpjax.errors import UsageError
from mpjax.precision.dtypes import HALF
from mpjax.precision.modules import apply_policy
from mpjax.precision.policy import Policy, get_policy
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
    """Runs one training step of a Flax NNX model under a policy and in float32, and says what differs and why.

    Args:
      model: an NNX module in the mode it is in (training or evaluation); it is left as it is, whatever its own dtypes.
      loss_fn: `loss_fn(model, batch)`, a scalar, or a pair of it and more.
      batch: a pytree of arrays.
      policy: the policy in question, a `Policy` or what `get_policy` takes.
      loss_scale: what the loss is multiplied by before it is differentiated.
      tolerance: largest relative error of the loss, and largest share of a gradient's norm lost to zero, that counts
        as healthy.
      search: whether to look for the smallest set of modules to keep in float32, and to verify it.
      tx: the optimizer, if its update is to be looked at too: parameters stored in half precision may not move.
      opt_state: its state, as of `nnx.state(model, nnx.Param)`; by default that of its first step.

    Returns:
      A `Diagnosis`: `verdict`, `path`, `direction`, `operation`, `source`, `rules`, `verified`, `table`.

    Raises:
      UsageError: a policy without half precision, which has nothing to diagnose, or a model that is no NNX module.
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise UsageError(
            f"diagnose takes a Flax NNX module, got {type(model).__name__}; for a function of parameters use "
            "mpjax.diagnosis.diagnose_function"
        )
    make, policy, optimizer = functools.partial(program_of_model, model, loss_fn, batch), _with_half(policy), None
    if tx is not None:
        stored = nnx.clone(model)
        apply_policy(stored, policy)
        params = nnx.state(stored, nnx.Param)
        optimizer = Optimizer(tx, params, tx.init(params) if opt_state is None else opt_state)
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
    """As `diagnose`, for a function of parameters and batch under autocast: Flax linen, Haiku, Equinox, your own.

    Args:
      loss_fn: `loss_fn(params, batch)`, a scalar, or a pair of it and more. Its named scopes, which linen and Haiku
        open, are the paths; of an Equinox module its own.
      params: a pytree, as an Equinox module, whose arrays are differentiated.
      batch: a pytree.
      policy: as of `diagnose`; its casts are placed by `autocast`.
      loss_scale: as of `diagnose`.
      tolerance: as of `diagnose`.
      search: as of `diagnose`.
    """
    make = functools.partial(program_of_function, loss_fn, params, batch)
    with progress_at() as progress:
        return diagnose_program(make, _with_half(policy), loss_scale, tolerance, search, progress)


def _with_half(spec: "str | Policy") -> Policy:
    policy = get_policy(spec)
    rules = (r.compute_dtype if isinstance(r, Policy) else r for r in policy.rules.values())
    if not set(HALF) & {policy.compute_dtype, policy.param_dtype, *rules}:
        raise UsageError(f"policy {policy} has no half precision: wanted one such as mixed_float16")
    return policy


def diagnose_program(
    make: Callable[[Policy], Program],
    policy: Policy,
    scale: float,
    tolerance: float,
    search: bool,
    progress: Progress = SILENT,
    optimizer: Optimizer | None = None,
) -> Diagnosis:
    """As `diagnose`, for whatever makes the step's program under a policy; one in full precision is looked at too."""
    check_numbers(tolerance=tolerance, loss_scale=scale)
    full = make(get_policy("float32"))
    program = make(policy).beside(full)._replace(progress=progress)
    known = program if program.constants.complete else full
    del full  # and, where it is not `known`, its copy of the parameters
    trace = run(program, scale)
    if known is not program:
        trace = trace._replace(wide=outputs_of(WITHOUT_ROUNDING, known, scale))
    reference = Reference(known, [np.asarray(x) / scale for x in trace.wide], tolerance)
    finding = find(program, trace, scale, reference)
    updates = updates_of(program, trace, scale, optimizer) if optimizer and all_finite(trace.wide + trace.low) else []
    if finding.verdict == "healthy":
        finding = lost_update(updates, tolerance) or finding
    in_update = finding.site is not None and finding.site.direction == "update"
    alone = run(program, scale, isolated=True) if finding.verdict not in ("healthy", "not_precision") else None
    rules, wanted = {}, search and not in_update and finding.verdict in ("overflow", "underflow", "rounding")
    if wanted and finding.better_scale is None:
        fault = Fault(make, policy, program, trace, scale, reference)
        finding, rules = with_lower_scale(finding, smallest_rules(fault), fault)
    unrepaired = wanted and not rules and finding.better_scale is None
    outside = unrepaired and is_repaired_outside(program, scale, reference)
    share = float32_share(program, rules)
    site = finding.site
    return Diagnosis(
        verdict=finding.verdict,
        path=_module(site.path) if site else None,
        direction=site.direction if site else None,
        operation=site.operation if site else None,
        source=site.source if site else None,
        evidence=finding.evidence,
        rules=rules,
        better_scale=finding.better_scale,
        verified=bool(rules) or finding.better_scale is not None or in_update,
        float32_flops=share,
        advice=tuple(_advice(finding, rules, share, searched=wanted, outside=outside)),
        table=(*table_of(trace, alone), *(update.row for update in updates)),
        policy=str(policy),
        loss_scale=float(scale),
        loss=(float(trace.low[0]) / scale, float(trace.wide[0]) / scale),
        flushed=_flushed(program, trace),
    )


def _module(path: str) -> str:
    """Returns a module's path for that of the scope in it that an einsum opens, or an Equinox layer by its class."""
    return "/".join(part for part in without_class(path).split("/") if "->" not in part)


def float32_share(program: Program, rules: Mapping[str, str]) -> float:
    """The share of the products' operations that rules keep in float32."""
    flops = program.flops()
    kept = sum(n for path, n in flops.items() if covers(rules, path))
    return kept / sum(flops.values()) if flops else 0.0


def _flushed(program: Program, trace: Trace) -> dict[str, float]:
    pairs = zip(program.gradients, trace.wide[1:], trace.low[1:], strict=True)
    return {name: flushed_share(wide, low) for name, wide, low in pairs}


def _advice(
    finding: Finding, rules: Mapping[str, str], share: float, *, searched: bool, outside: bool
) -> Iterator[str]:
    if finding.site is not None and finding.site.direction == "update":
        yield (
            "Keep float32 copies of the parameters, mpjax.master_weights(optimizer), --precision.master_weights on, or "
            "store them in float32: then the update is not lost (verified by running)."
        )
    elif finding.better_scale is not None and rules:
        yield (
            f"Keep in float32, {share:.1%} of the products' work: {_lines(rules)}, and scale the loss by "
            f"{finding.better_scale:g} (verified by running, both together), {_OR_DYNAMIC}"
        )
    elif finding.better_scale is not None:
        yield f"Scale the loss by {finding.better_scale:g} (verified by running), {_OR_DYNAMIC}"
    elif rules:
        yield f"Keep in float32, {share:.1%} of the products' work: {_lines(rules)} (verified by running)."
    elif outside:
        place = f"at {finding.site.source}" if finding.site else "such as the loss"
        yield (
            f"Compute in float32 what is outside of all modules, {place}, where no rule reaches: call "
            ".astype(jnp.float32) on what goes into it. With all of it in float32 the step is healthy (emulated)."
        )
    elif searched:
        yield "No set of modules to keep in float32 repairs the step."


_OR_DYNAMIC = "or let mpjax.dynamic_loss_scaling(optimizer), --precision.loss_scale dynamic, find the scale."


def _lines(rules: Mapping[str, str]) -> str:
    return ", ".join(f'"{path}" = "{dtype}"' for path, dtype in rules.items())


def check_numbers(**numbers: float) -> None:
    """Raises UsageError for a number that is not positive and finite."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}: wanted a positive number")
