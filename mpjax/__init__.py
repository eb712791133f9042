"""mpjax: mixed-precision training for JAX and Flax.

Public names are imported on first use. `import mpjax` alone imports neither Flax nor a data library, but it may add an
option to `XLA_FLAGS` (`mpjax/xla_cpu.py`), so import it before JAX computes. Type checkers read the names in
`__init__.pyi`.
"""

import importlib
from typing import Any

from mpjax.xla_cpu import keep_sums_right


_HOME = {
    # What a user starts with.
    "Policy": "mpjax.precision",
    "get_policy": "mpjax.precision",
    "apply_policy": "mpjax.precision",
    "autocast": "mpjax.precision",
    "full_precision": "mpjax.precision",
    "dynamic_loss_scaling": "mpjax.precision",
    "static_loss_scaling": "mpjax.precision",
    "no_loss_scaling": "mpjax.precision",
    "scaled_value_and_grad": "mpjax.precision",
    "where_finite": "mpjax.precision",
    "master_weights": "mpjax.precision",
    "reduce_gradients": "mpjax.precision",
    "diagnose": "mpjax.diagnosis",
    "receipt": "mpjax.plan.receipt_of_function",
    "run": "mpjax.commands.train",
    "Config": "mpjax.config",
    "Callback": "mpjax.extend",
    "load_pretrained": "mpjax.models.pretrained",
    "make_train_step": "mpjax.training",
    "create_state": "mpjax.training",
    "TrainState": "mpjax.training",
    "UsageError": "mpjax.errors",
    "Diverged": "mpjax.errors",
    # Dtypes of a program.
    "audit": "mpjax.precision",
    "check_dtypes": "mpjax.precision",
    # Loss scaling by hand.
    "scale_loss": "mpjax.precision",
    "loss_scale_state": "mpjax.precision",
    "LossScaleState": "mpjax.precision",
    # Runs and training steps.
    "Duration": "mpjax.config",
    "take_apart": "mpjax.training",
    "make_eval_step": "mpjax.training",
    "Mean": "mpjax.training",
    # Results.
    "diagnose_function": "mpjax.diagnosis",
    "Diagnosis": "mpjax.diagnosis",
    "mismatch": "mpjax.diagnosis.log_ratios",
    "Mismatch": "mpjax.diagnosis.log_ratios",
    "Receipt": "mpjax.plan.receipt",
    # What a callback is called with.
    "RunInfo": "mpjax.extend",
    # Errors and warnings.
    "CallbackError": "mpjax.errors",
    "DtypeError": "mpjax.errors",
    "Interrupted": "mpjax.errors",
    "CheckpointWarning": "mpjax.errors",
    "DataWarning": "mpjax.errors",
    "LoggerWarning": "mpjax.errors",
    "PrecisionWarning": "mpjax.errors",
}
"""The module of each public name: first the names that a user starts with, then the others in the order of
docs/reference."""

__all__ = list(_HOME)


_PARTS = ("config", "data", "diagnosis", "loop", "models", "plan", "precision", "report", "training")


keep_sums_right()  # before JAX first computes


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mpjax")
    if name in _PARTS:
        return importlib.import_module(f"mpjax.{name}")
    if name not in _HOME:
        import difflib

        near = difflib.get_close_matches(name, (*__all__, *_PARTS), n=1)
        hint = f". Did you mean: '{near[0]}'?" if near else ""
        raise AttributeError(f"module 'mpjax' has no attribute '{name}'{hint}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
