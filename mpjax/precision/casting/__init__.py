"""Per-operation casting of any JAX function: a function in, the same function with casts out."""

from mpjax.precision.casting.operations import OPERATIONS, Operations
from mpjax.precision.casting.transform import autocast, full_precision


__all__ = ["OPERATIONS", "Operations", "autocast", "full_precision"]
