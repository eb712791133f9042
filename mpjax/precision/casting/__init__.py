"""Casts per operation: `autocast` runs any JAX function with each operation in the dtype that lists say."""

from mpjax.precision.casting.operations import OPERATIONS, Operations
from mpjax.precision.casting.own_sums import has_own_code, with_sums_in_float32
from mpjax.precision.casting.transform import autocast, full_precision


__all__ = ["OPERATIONS", "Operations", "autocast", "full_precision", "has_own_code", "with_sums_in_float32"]
