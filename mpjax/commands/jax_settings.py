"""Sets JAX's configuration for a run: the cache folder of compiled programs, and 64-bit arrays."""

import jax

from mpjax.config.folders import program_folder
from mpjax.config.schema import Config
from mpjax.precision.float8.recipes import capability_of, require_units
from mpjax.training.precision_plan import PrecisionPlan


def set_up_jax(config: Config, plan: PrecisionPlan) -> None:
    """Sets JAX's cache folder of compiled programs, and enables x64 for a float64 policy; call it before arrays exist.

    These are global settings of JAX, and stay after the run. Programs are cached however short their compilation. If
    other users can write in the folder, JAX's own cache setting (by default no cache) stays, and stderr has a warning.

    Raises:
      UsageError: the GPU has no units for the policy's float8 products.
    """
    if (folder := program_folder(config)) is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if plan.float64:
        jax.config.update("jax_enable_x64", True)
    if plan.policy.recipes:
        device = jax.local_devices()[0]
        require_units(plan.policy.recipes, capability_of(device), device.device_kind)
