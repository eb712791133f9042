"""Is precision to blame? One step under a policy and in float32, where they part, and what repairs it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from mpjax.diagnosis.diagnosis import Diagnosis, table_of
from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.program import Program, program_of_function, program_of_model
from mpjax.diagnosis.search import smallest_repair
from mpjax.diagnosis.verdict import Finding, Trace, find, flushed_share, is_repaired, run
from mpjax.errors import UsageError
from mpjax.precision.dtypes import HALF
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy


def diagnose(
    model,
    loss_fn: Callable,
    batch,
    *,
    policy: "str | Policy" = "mixed_float16",
    loss_scale: float = 1.0,
    tolerance: float = 0.05,
    search: bool = True,
) -> Diagnosis:
    """Runs one training step of a Flax NNX model under a policy and in float32, and says what differs and why.

    Args:
      model: an NNX module in the mode it is in (training or evaluation); it is left as it is, whatever its own dtypes.
      loss_fn: `loss_fn(model, batch)`, a scalar.
      batch: a pytree of arrays.
      policy: the policy in question, a `Policy` or what `get_policy` takes.
      loss_scale: what the loss is multiplied by before it is differentiated.
      tolerance: largest relative error of the loss, and largest share of a gradient's norm lost to zero, that counts
        as healthy.
      search: whether to look for the smallest set of modules to keep in float32, and to verify it.

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
    return _diagnose(lambda p: program_of_model(model, loss_fn, batch, p), policy, loss_scale, tolerance, search)


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
      loss_fn: `loss_fn(params, batch)`, a scalar. Its named scopes, which linen, Haiku and Equinox open, are the paths.
      params: a pytree of arrays, differentiated.
      batch: a pytree.
      policy: as of `diagnose`; its casts are placed by `autocast`.
      loss_scale: as of `diagnose`.
      tolerance: as of `diagnose`.
      search: as of `diagnose`.
    """
    return _diagnose(
        lambda policy: program_of_function(loss_fn, params, batch, policy), policy, loss_scale, tolerance, search
    )


def _diagnose(make: Callable[[Policy], Program], policy, scale: float, tolerance: float, search: bool) -> Diagnosis:
    policy = get_policy(policy)
    if policy.compute_dtype not in HALF and policy.param_dtype not in HALF and not _half_rules(policy):
        raise UsageError(f"policy {policy} has no half precision: wanted one such as mixed_float16")
    program = make(policy)
    trace = run(program, scale)
    finding = find(program, trace, scale, tolerance)
    alone = run(program, scale, isolated=True) if finding.verdict not in ("healthy", "not_precision") else None
    wanted = search and finding.verdict in ("overflow", "underflow", "rounding") and finding.better_scale is None
    repair = smallest_repair(program, trace, scale, tolerance) if wanted else None
    paths = sorted(repair.paths, key=lambda path: path == "") if repair else []  # "*" last: the first match wins
    rules = {path or "*": "float32" for path in paths}
    verified = finding.better_scale is not None or (bool(rules) and _verify(make, policy, rules, scale, tolerance))
    share = _float32_share(program, rules)
    site = finding.site
    return Diagnosis(
        verdict=finding.verdict,
        path=site.path if site else None,
        direction=site.direction if site else None,
        operation=site.operation if site else None,
        source=site.source if site else None,
        evidence=finding.evidence,
        rules=rules,
        better_scale=finding.better_scale,
        verified=verified,
        float32_flops=share,
        advice=tuple(_advice(finding, rules, verified, share)),
        table=table_of(trace, alone),
        policy=str(policy),
        loss_scale=float(scale),
        loss=(float(trace.low[0]) / scale, float(trace.wide[0]) / scale),
        flushed=_flushed(program, trace),
    )


def _half_rules(policy: Policy) -> bool:
    return any((r.compute_dtype if isinstance(r, Policy) else r) in HALF for r in policy.rules.values())


def with_rules(policy: Policy, rules: Mapping[str, str]) -> Policy:
    """The policy with rules that come before its own."""
    kept = {pattern: value for pattern, value in policy.rules.items() if pattern not in rules}
    return dataclasses.replace(policy, rules={**rules, **kept})


def _verify(make: Callable[[Policy], Program], policy: Policy, rules: dict[str, str], scale: float, tolerance) -> bool:
    """Whether the step under the policy with the rules, traced anew, is repaired."""
    program = make(with_rules(policy, rules))
    outputs = Emulator().run(program.jaxpr, program.with_scale(scale))
    return is_repaired([p.wide for p in outputs], [p.low for p in outputs], tolerance)


def _float32_share(program: Program, rules: Mapping[str, str]) -> float:
    flops = program.flops()
    kept = sum(n for path, n in flops.items() if any(_under(path, rule) for rule in rules))
    return kept / sum(flops.values()) if flops else 0.0


def _under(path: str, rule: str) -> bool:
    return rule == "*" or f"{path}/".startswith(f"{rule}/")


def _flushed(program: Program, trace: Trace) -> dict[str, float]:
    pairs = zip(program.gradients, trace.wide[1:], trace.low[1:], strict=True)
    return {name: flushed_share(wide, low) for name, wide, low in pairs}


def _advice(finding: Finding, rules: Mapping[str, str], verified: bool, share: float) -> Iterator[str]:
    if finding.better_scale is not None:
        yield (
            f"Scale the loss by {finding.better_scale:g} (verified by running), or let "
            "mpjax.dynamic_loss_scaling(optimizer), --precision.loss_scale dynamic, find the scale."
        )
    elif rules:
        lines = ", ".join(f'"{path}" = "float32"' for path in rules)
        proof = "verified by running" if verified else "not verified: a run under them is not repaired"
        yield f"Keep in float32, {share:.1%} of the products' work: {lines} ({proof})."
    elif finding.verdict in ("overflow", "underflow", "rounding"):
        yield "No set of modules to keep in float32 is known that repairs the step."
