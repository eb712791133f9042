"""Per-operation casting of any JAX function: a function in, the same function with casts out."""

from mpjax.precision.casting.autocast import autocast, full_precision
from mpjax.precision.casting.operations import OPERATIONS, Operations


__all__ = ["OPERATIONS", "Operations", "autocast", "full_precision"]
