"""Precision policies, dtype casts and loss scaling; each works without the others and without Flax."""

from mpjax.precision.calls import name_scopes
from mpjax.precision.casting import OPERATIONS, Operations, autocast, full_precision, with_sums_in_float32
from mpjax.precision.dtype_audit import audit
from mpjax.precision.dtype_audit_report import Audit
from mpjax.precision.dtypes import check_dtypes
from mpjax.precision.eight_bit_moments import int8_moments
from mpjax.precision.float8.moments import float8_moments
from mpjax.precision.half_weights import compensated_weights, stochastic_weights
from mpjax.precision.loss_scale import dynamic_loss_scaling, no_loss_scaling, static_loss_scaling
from mpjax.precision.master import master_weights
from mpjax.precision.modules import apply_policy
from mpjax.precision.moments import half_moments
from mpjax.precision.policy import Policy
from mpjax.precision.policy_report import PolicyReport
from mpjax.precision.presets import get_policy
from mpjax.precision.reduction import reduce_gradients
from mpjax.precision.scale_state import LossScaleState, loss_scale_state, where_finite
from mpjax.precision.scaled_loss import scale_loss, scaled_value_and_grad


__all__ = [
    "OPERATIONS",
    "Audit",
    "LossScaleState",
    "Operations",
    "Policy",
    "PolicyReport",
    "apply_policy",
    "audit",
    "autocast",
    "check_dtypes",
    "compensated_weights",
    "dynamic_loss_scaling",
    "float8_moments",
    "full_precision",
    "get_policy",
    "half_moments",
    "int8_moments",
    "loss_scale_state",
    "master_weights",
    "name_scopes",
    "no_loss_scaling",
    "reduce_gradients",
    "scale_loss",
    "scaled_value_and_grad",
    "static_loss_scaling",
    "stochastic_weights",
    "where_finite",
    "with_sums_in_float32",
]
