"""Builds the optax optimizer from the settings: schedule, clipping, update rule, master weights, loss scaling."""

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import optax

from mpjax.config import schema
from mpjax.errors import UsageError
from mpjax.models.stacked_arrays import Stacks, stack_of
from mpjax.precision.dtypes import path_name
from mpjax.precision.gradient_norm import clip_by_global_norm
from mpjax.precision.loss_scale import dynamic_loss_scaling, no_loss_scaling, static_loss_scaling
from mpjax.precision.master import master_weights
from mpjax.precision.moments import half_moments
from mpjax.training.muon import muon_and_sgd


ELEMENTWISE = ("sgd", "adamw")
"""The optimizers that treat numbers one by one, but for weight decay, which passes over vectors."""


def learning_rate_schedule(config: schema.Optimizer, *, steps: int, warmup: int) -> optax.Schedule:
    """Returns the learning rate as a function of applied steps: linear warm-up to the peak, then `config.schedule`.

    Args:
      config: the `optimizer` section.
      steps: length of training.
      warmup: steps until the peak; capped at a fifth of training, so that a short trial of a long recipe still learns.
    """
    peak = config.learning_rate
    warmup = min(warmup, steps // 5)
    rest = steps - warmup
    if config.schedule == "one_cycle":
        return optax.cosine_onecycle_schedule(steps, peak, pct_start=max(warmup, 1) / steps)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def update_rule(
    config: schema.Optimizer, learning_rate: optax.Schedule, stacks: Stacks = MappingProxyType({})
) -> optax.GradientTransformation:
    """Returns clipping of the unscaled gradient chained with the update rule, for parameters by path.

    Weight decay applies to kernels only, not to norms and biases. `config.moments` sets the dtype of the moments.

    Args:
      config: the `optimizer` section.
      learning_rate: the learning rate of each step.
      stacks: the stacks of blocks in the model: what a rule says of an array, it says of each row of theirs.
    """
    rules = {"sgd": _sgd, "adamw": _adamw, "lamb": _lamb, "muon": _muon}
    clip = clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    rule = optax.chain(clip, rules[config.name](config, learning_rate, stacks))
    return half_moments(rule) if config.moments == "bfloat16" else rule


def with_precision(
    inner: optax.GradientTransformation, config: schema.Precision, *, loss_scale: str | float, masters: bool
) -> optax.GradientTransformation:
    """Wraps `inner` in master weights if `masters`, then in loss scaling: "none", "dynamic", or a static scale."""
    if masters:
        inner = master_weights(inner, stochastic_rounding=config.stochastic_rounding)
    if loss_scale == "none":
        return no_loss_scaling(inner)
    if isinstance(loss_scale, float):
        return static_loss_scaling(inner, loss_scale)
    return dynamic_loss_scaling(
        inner,
        initial_scale=config.initial_scale,
        growth_interval=config.growth_interval,
        min_scale=config.min_scale,
        max_scale=config.max_scale,
        hysteresis=config.hysteresis,
        tolerance=config.tolerance,
    )


def _sgd(config: schema.Optimizer, learning_rate: optax.Schedule, stacks: Stacks) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=_kernels(stacks)),
        optax.sgd(learning_rate, momentum=config.momentum, nesterov=config.nesterov),
    )


def _adamw(config: schema.Optimizer, learning_rate: optax.Schedule, stacks: Stacks) -> optax.GradientTransformation:
    mask = _kernels(stacks)
    return optax.adamw(learning_rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=mask)


def _lamb(config: schema.Optimizer, learning_rate: optax.Schedule, stacks: Stacks) -> optax.GradientTransformation:
    # optax.lamb, but for the ratio of norms: each block has its own.
    return optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=_kernels(stacks)),
        _row_by_row(optax.scale_by_trust_ratio(), stacks),
        optax.scale_by_learning_rate(learning_rate),
    )


def _muon(config: schema.Optimizer, learning_rate: optax.Schedule, stacks: Stacks) -> optax.GradientTransformation:
    if stacks:
        raise UsageError(
            "--optimizer.name muon: it is for filters of four axes, which stacks of blocks may have too; write "
            "--model.no_scan_blocks, or another optimizer"
        )
    share = config.rest_learning_rate / config.learning_rate if config.rest_learning_rate else 1.0
    return muon_and_sgd(
        learning_rate,
        lambda count: share * learning_rate(count),
        momentum=config.momentum,
        rest_momentum=config.rest_momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        mask=_kernels(stacks),
        normalise=config.normalise_filters,
    )


def _kernels(stacks: Stacks) -> Callable[[Any], Any]:
    """Returns the mask of the parameters that decay: kernels have several axes, scales and biases one."""

    def is_kernel(path: tuple, param: Any) -> bool:
        lead = 0 if stack_of(path_name(path), stacks) is None else 1
        return param.ndim - lead > 1

    return functools.partial(jax.tree_util.tree_map_with_path, is_kernel)


def _row_by_row(rule: optax.GradientTransformation, stacks: Stacks) -> optax.GradientTransformation:
    """Returns a rule without state that treats each row of a stacked array as an array."""

    def update(updates, state, params=None):
        def one(update, param):
            return rule.update(update, state, param)[0]

        def each(path: tuple, update, param):
            return (one if stack_of(path_name(path), stacks) is None else jax.vmap(one))(update, param)

        return jax.tree_util.tree_map_with_path(each, updates, params), state

    return optax.GradientTransformation(rule.init, update)
