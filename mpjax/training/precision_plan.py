"""Turns the precision settings into a policy and loss scaling; rejects contradictory settings."""

import dataclasses
from typing import NamedTuple

from mpjax.config import schema
from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT16, FLOAT64, HALF, slow_half_reason
from mpjax.precision.float8.recipes import emulated_reason
from mpjax.precision.modules import storage_policy
from mpjax.precision.policy import Policy
from mpjax.precision.presets import Preset, find_preset, get_policy
from mpjax.precision.rules import NORM


WITHOUT_COPIES = ("stochastic", "kahan")
"""Settings of `master_weights` that keep small updates without float32 copies."""


class PrecisionPlan(NamedTuple):
    """The precision of a run.

    Attributes:
      policy: the dtypes and rules.
      mode: "module" (dtypes set on the model's modules) or "autocast" (casts placed per operation).
      loss_scale: "none", "dynamic", or a static scale.
      weights: the treatment of updates that are smaller than the rounding of half-precision parameters: float32
        "copies", "stochastic" rounding, a compensation ("kahan"), or "none".
    """

    policy: Policy
    mode: str
    loss_scale: str | float
    weights: str

    @property
    def master_weights(self) -> bool:
        """True if the optimizer keeps float32 copies of half-precision parameters."""
        return self.weights == "copies"

    @property
    def least_update(self) -> str:
        """The narrowest dtype in which parameters are updated, "float32"; an empty string if it is their own."""
        return "" if self.weights == "none" else "float32"

    @property
    def module_policy(self) -> Policy:
        """The policy to set on the model's modules; in mode "autocast" it has only the storage dtypes of arrays."""
        return storage_policy(self.policy) if self.mode == "autocast" else self.policy

    @property
    def is_half(self) -> bool:
        """True if the policy computes in half precision; rules do not count."""
        return self.policy.compute_dtype in HALF

    @property
    def float64(self) -> bool:
        """True if the policy's parameter, compute or output dtype is float64; rules do not count."""
        return FLOAT64 in (self.policy.param_dtype, self.policy.compute_dtype, self.policy.output_dtype)


def plan_precision(config: schema.Precision) -> PrecisionPlan:
    """Plans the precision of a run from the `precision` section of the settings, and resolves each "auto" in it.

    Rules of `config.rules` come before the rules of the policy.

    Raises:
      UsageError: a policy, dtype or loss scale is unknown, or settings contradict each other.
    """
    policy = get_policy(config.policy)
    rules = {**config.rules, **{p: v for p, v in policy.rules.items() if p not in config.rules}}
    policy = dataclasses.replace(policy, rules=rules)
    preset = find_preset(config.policy) or Preset("", policy)
    halves = policy.param_dtype in HALF
    if config.master_weights in ("on", *WITHOUT_COPIES) and not halves:
        raise UsageError(
            f"--precision.master_weights {config.master_weights} contradicts --precision.policy {config.policy}: its "
            f"parameters are {policy.param_dtype} already; write float16 or bfloat16 as the policy, or leave "
            "master_weights at auto"
        )
    masters = config.master_weights == "on" or (config.master_weights == "auto" and preset.master_weights)
    if config.loss_scale.strip().lower() not in ("auto", "dynamic") and (unused := _dynamic_settings(config)):
        raise UsageError(
            f"--precision.loss_scale {config.loss_scale} contradicts {', '.join(unused)}, which only a dynamic "
            "loss scale uses: leave out one or the other"
        )
    if policy.reduce_dtype == FLOAT64 and policy.param_dtype != FLOAT64:
        raise UsageError(
            f"reduce=float64 contradicts params={policy.param_dtype}: gradients are added in float32 at most, unless "
            "parameters are float64; write reduce=float32 or params=float64"
        )
    if config.stochastic_rounding and not masters:
        raise UsageError(
            "--precision.stochastic_rounding rounds parameters from their float32 master weights, and this run has "
            "none: write float16 or bfloat16 as the policy, and master_weights auto or on"
        )
    kept = config.master_weights if config.master_weights in WITHOUT_COPIES else "copies" if masters else "none"
    return PrecisionPlan(policy, _mode(config, preset, policy), _loss_scale(config, preset, policy), kept)


def advice(plan: PrecisionPlan, config: schema.Precision, device) -> list[str]:
    """Collects sentences of advice on settings that are valid but seldom intended on `device` (a `jax.Device`).

    Empty if there is none.
    """
    policy = plan.policy
    notes = []
    if plan.loss_scale != "dynamic" and (unused := _dynamic_settings(config)):
        notes.append(
            f"{', '.join(unused)} without effect: the loss scale of --precision.policy {config.policy} is "
            f"{plan.loss_scale}; leave out what only a dynamic one uses"
        )
    computes_in_float16 = FLOAT16 in (policy.compute_dtype, *_rule_dtypes(policy))
    if plan.loss_scale != "none" and not computes_in_float16:
        notes.append(
            f"loss scaling is not needed: gradients do not underflow in {policy.compute_dtype} as they do in float16; "
            "--precision.loss_scale none saves the check"
        )
    if plan.loss_scale == "none" and computes_in_float16:
        notes.append(
            "float16 without loss scaling: gradients below 6e-8 become zero; --precision.loss_scale dynamic keeps them"
        )
    if policy.param_dtype in HALF and plan.weights == "none":
        notes.append(
            f"{policy.param_dtype} parameters without master weights: updates below a parameter's rounding are lost; "
            "--precision.master_weights on keeps them, and so do stochastic and kahan, with less memory"
        )
    notes += [reason for recipe in policy.recipes if (reason := emulated_reason(recipe, device.platform))]
    if reason := slow_half_reason(policy.compute_dtype, device):
        notes.append(reason)
    return notes


def floor_of(plan: PrecisionPlan, config: schema.Precision) -> float | None:
    """The smallest loss scale of the run, `min_scale` or the static scale; None without loss scaling."""
    if plan.loss_scale == "none":
        return None
    return config.min_scale if plan.loss_scale == "dynamic" else float(plan.loss_scale)


def _dynamic_settings(config: schema.Precision) -> list[str]:
    """Lists the settings of a dynamic loss scale that differ from their defaults, as flags with their values."""
    names = ("initial_scale", "growth_interval", "min_scale", "max_scale", "hysteresis", "tolerance")
    usual = schema.Precision()
    return [
        f"--precision.{name} {getattr(config, name)}" for name in names if getattr(config, name) != getattr(usual, name)
    ]


def _mode(config: schema.Precision, preset: Preset, policy: Policy) -> str:
    """Chooses "module" or "autocast"; raises UsageError if the setting contradicts the policy or one of its rules."""
    mode = preset.mode if config.mode == "auto" else config.mode
    if mode == "module" and preset.mode == "autocast":
        raise UsageError(
            f"--precision.mode module contradicts --precision.policy {config.policy}, which is autocast; write O2 for "
            "the same dtypes set on modules"
        )
    dtypes = zip(policy.rules, _rule_dtypes(policy), strict=True)
    half_norms = [dtype for pattern, dtype in dtypes if pattern.lower() == NORM and dtype in HALF]
    if mode == "autocast" and half_norms:
        raise UsageError(
            f"--precision.mode autocast contradicts --precision.policy {config.policy}: autocast computes norms in "
            f"float32, and rule '{NORM}' asks for {half_norms[0]}; leave out one of the two"
        )
    return mode


def _usual_scaling(policy: Policy) -> str:
    """Chooses "dynamic" if the policy or one of its rules computes in float16, else "none"."""
    return "dynamic" if FLOAT16 in (policy.compute_dtype, *_rule_dtypes(policy)) else "none"


def _rule_dtypes(policy: Policy):
    return [policy.computes(value) for value in policy.rules.values()]


def _loss_scale(config: schema.Precision, preset: Preset, policy: Policy) -> str | float:
    """Chooses "dynamic", "none" or a static scale; raises UsageError for a setting that is no name and no number."""
    word = config.loss_scale.strip().lower()
    if word == "auto":
        return 1.0 if preset.loss_scale == "static" else _usual_scaling(policy)
    if word in ("dynamic", "none"):
        return word
    try:
        return float(word)
    except ValueError:
        raise UsageError(
            f"--precision.loss_scale {config.loss_scale}: wanted auto, dynamic, none, or a power of two such as 1024"
        ) from None
