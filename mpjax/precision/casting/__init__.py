"""Per-operation casting: `autocast` takes any JAX function and returns it with casts."""

from mpjax.precision.casting.operations import OPERATIONS, Operations
from mpjax.precision.casting.transform import autocast, full_precision


__all__ = ["OPERATIONS", "Operations", "autocast", "full_precision"]
