"""Builds the optax optimizer from the settings: clipping, update rule, master weights, loss scaling."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax

from mpjax.config import schema
from mpjax.errors import UsageError
from mpjax.models.scan import Stacks, stack_of
from mpjax.precision.dtypes import FLOAT64, path_name
from mpjax.precision.eight_bit_moments import int8_moments
from mpjax.precision.float8.moments import float8_moments
from mpjax.precision.gradient_norm import clip_by_global_norm
from mpjax.precision.half_weights import compensated_weights, stochastic_weights
from mpjax.precision.loss_scale import dynamic_loss_scaling, no_loss_scaling, static_loss_scaling
from mpjax.precision.master import master_weights
from mpjax.precision.moments import half_moments
from mpjax.training.kernels import BY_AXES, Kernels
from mpjax.training.named_rule import find_rule
from mpjax.training.rates import scale_by_path


ELEMENTWISE = frozenset(
    {"sgd", "adamw"}
    | {"acprop", "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adan", "ademamix", "adopt"}
    | {"amsgrad", "cocob", "lion", "madgrad", "nadam", "nadamw", "optimistic_adam", "optimistic_adam_v2"}
    | {"optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sign_sgd", "signum", "simplified_ademamix", "yogi"}
)
"""The optimizers that are elementwise, except for weight decay, which skips vectors.

Their state may be packed, and blocks may be stacked. All other optimizers are assumed to depend on whole arrays.
"""


def update_rule(
    config: schema.Optimizer,
    learning_rate: optax.Schedule,
    kernels: Kernels = BY_AXES,
    *,
    factors: Mapping[str, float] = MappingProxyType({}),
    params: Mapping[str, Any] | None = None,
    steps: int = 1,
    warmup: int = 0,
) -> optax.GradientTransformation:
    """Chains clipping of the gradient and the update rule, for parameters by path; gradients have to be unscaled.

    Weight decay applies to kernels only, but to all parameters if an optimizer of optax or of the user takes
    `weight_decay` and no mask. `config.moments` sets the dtype of the moments. A `config.clip_norm` of 0 does not clip.

    Args:
      config: the `optimizer` section.
      learning_rate: the learning rate of each step.
      kernels: the kernels of the model. A rule for an array applies to each row of a stack of blocks.
      factors: factors on the learning rate by path; see `scale_by_path`.
      params: the shapes of the parameters, to trace an optimizer of optax or of the user; None: two small ones.
      steps: the length of training in steps, for an optimizer of the user that takes it.
      warmup: the length of the warm-up in steps, likewise.

    Raises:
      UsageError: the optimizer does not fit (see `find_rule` and `NamedRule.build`), it may depend on whole arrays and
        blocks are stacked, or moments narrower than float32 are set for float64 parameters.
    """
    if config.moments != "float32" and FLOAT64 in [param.dtype for param in (params or {}).values()]:
        raise UsageError(
            f"--optimizer.moments {config.moments}: moments of float64 parameters are float64; write "
            "--optimizer.moments float32, which leaves them as they are, or a policy with float32 parameters"
        )
    clip = clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    named_rule = find_rule(config)
    if named_rule is None:
        rule = {"sgd": _sgd, "adamw": _adamw, "lamb": _lamb}[str(config.name)](config, learning_rate, kernels)
    else:
        if kernels.stacks and config.name not in ELEMENTWISE and not named_rule.updates_rows_apart:
            raise UsageError(
                f"--optimizer.name {config.name} with --model.scan_blocks: the blocks are rows of one array, which it "
                f"may treat as a whole; write --model.no_scan_blocks, or lamb, {', '.join(sorted(ELEMENTWISE))}"
            )
        rule = named_rule.build(config, learning_rate, kernels, params=params, steps=steps, warmup=warmup)
    transforms = [clip, rule, scale_by_path(factors, kernels.stacks)] if factors else [clip, rule]
    rule = optax.chain(*transforms)
    return _MOMENTS[config.moments](rule)


_MOMENTS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda rule: rule,
    "bfloat16": half_moments,
    "float8": float8_moments,
    "int8": int8_moments,
    "int8_linear": functools.partial(int8_moments, quantisation="linear"),
}


_OTHER_MOMENTS = (
    {"adamax", "adamaxw"},
    *({name} for name in ("acprop", "adabelief", "adafactor", "adan", "ademamix", "adopt", "dadapt_adamw", "madgrad")),
    *({name} for name in ("momo", "momo_adam", "novograd", "prodigy", "simplified_ademamix")),
)
"""Optimizers whose moments are not means of gradients and of their squares, although some have the names of these."""


def has_moments_of(name: str, other: str) -> bool:
    """True if an optimizer can go on with the moments of another, by their names in the settings.

    Adamax's `nu` is a largest gradient where Adam's is a mean of squares, and the `mu` of ADOPT is a mean of gradients
    that are divided already: Adam would take steps hundreds of times too short or too long. Optimizers of the user are
    taken to have the moments of Adam.
    """
    return all((name in names) == (other in names) for names in _OTHER_MOMENTS)


def advice_on(config: schema.Optimizer) -> tuple[str, ...]:
    """The notes on an optimizer for the user, such as that it applies no weight decay; empty for sgd, adamw and lamb.

    Raises UsageError as `find_rule` does.
    """
    named_rule = find_rule(config)
    return () if named_rule is None else named_rule.notes


def treats_numbers_one_by_one(config: schema.Optimizer) -> bool:
    """True if the rule is elementwise, has one rate for all paths and no moments in groups: its state may be packed."""
    apart = config.moments in ("float32", "bfloat16")
    return config.name in ELEMENTWISE and not config.rates and config.layer_decay == 1 and apart


def with_precision(
    inner: optax.GradientTransformation, config: schema.Precision, *, loss_scale: str | float, weights: str
) -> optax.GradientTransformation:
    """Wraps an update rule for half-precision parameters, then in loss scaling.

    Args:
      inner: the update rule.
      config: the `precision` section, with the settings of a dynamic loss scale.
      loss_scale: "none", "dynamic", or a static scale. "none" also adds the state of a loss scale, which stays 1, but
        neither checks gradients nor skips steps.
      weights: how small updates of half-precision parameters are kept: by "copies" in float32, by "stochastic"
        rounding, by a compensation ("kahan"), or not ("none").
    """
    if weights == "copies":
        inner = master_weights(inner, stochastic_rounding=config.stochastic_rounding)
    elif weights != "none":
        inner = {"stochastic": stochastic_weights, "kahan": compensated_weights}[weights](inner)
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


def _sgd(config: schema.Optimizer, learning_rate: optax.Schedule, kernels: Kernels) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=kernels.mask),
        optax.sgd(learning_rate, momentum=config.momentum, nesterov=config.nesterov),
    )


def _adamw(config: schema.Optimizer, learning_rate: optax.Schedule, kernels: Kernels) -> optax.GradientTransformation:
    return optax.adamw(
        learning_rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=kernels.mask
    )


def _lamb(config: schema.Optimizer, learning_rate: optax.Schedule, kernels: Kernels) -> optax.GradientTransformation:
    # As optax.lamb, except that each block has its own ratio of norms.
    return optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=kernels.mask),
        _row_by_row(optax.scale_by_trust_ratio(), kernels.stacks),
        optax.scale_by_learning_rate(learning_rate),
    )


def _row_by_row(rule: optax.GradientTransformation, stacks: Stacks) -> optax.GradientTransformation:
    """Wraps a stateless rule to apply it to each block of a stacked array alone, and to other arrays as a whole."""

    def update(updates, state, params=None):
        def one(update, param):
            return rule.update(update, state, param)[0]

        def by_block(path: tuple, update, param):
            return (one if stack_of(path_name(path), stacks) is None else jax.vmap(one))(update, param)

        return jax.tree_util.tree_map_with_path(by_block, updates, params), state

    return optax.GradientTransformation(rule.init, update)
