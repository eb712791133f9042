"""mpjax: mixed-precision training for JAX and Flax.

Public names are imported on first use. `import mpjax` alone imports neither Flax nor a data library. Type checkers read
the names in `__init__.pyi`.
"""

import importlib
from typing import Any


_HOMES = {
    "mpjax.errors": (
        "CallbackError",
        "CheckpointWarning",
        "DataWarning",
        "Diverged",
        "DtypeError",
        "Interrupted",
        "LoggerWarning",
        "PrecisionWarning",
        "UsageError",
    ),
    "mpjax.precision": (
        "LossScaleState",
        "Policy",
        "apply_policy",
        "audit",
        "autocast",
        "check_dtypes",
        "dynamic_loss_scaling",
        "full_precision",
        "get_policy",
        "loss_scale_state",
        "master_weights",
        "no_loss_scaling",
        "reduce_gradients",
        "scale_loss",
        "scaled_value_and_grad",
        "static_loss_scaling",
        "where_finite",
    ),
    "mpjax.config": ("Config", "Duration"),
    "mpjax.extend": ("Callback", "RunInfo"),
    "mpjax.training": ("Mean", "TrainState", "create_state", "make_eval_step", "make_train_step", "take_apart"),
    "mpjax.diagnosis": ("Diagnosis", "diagnose", "diagnose_function"),
    "mpjax.models.pretrained": ("load_pretrained",),
    "mpjax.plan.receipt_of_function": ("receipt",),
    "mpjax.plan.receipt": ("Receipt",),
    "mpjax.commands.train": ("run",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605 (a list, computed)


_PARTS = ("config", "data", "diagnosis", "loop", "models", "plan", "precision", "report", "training")


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
