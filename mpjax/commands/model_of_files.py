"""The precision of a model of `hf:FOLDER`, which no run describes."""

import pathlib

from mpjax.commands.jax_settings import set_up_jax
from mpjax.config.commands import FROM_FILES, Prediction
from mpjax.config.folders import with_policy
from mpjax.config.schema import Config
from mpjax.errors import UsageError
from mpjax.models.pretrained.files import find_folder
from mpjax.training.precision_plan import PrecisionPlan, plan_precision


def folder_of(settings: Prediction) -> pathlib.Path:
    """Finds the folder of `--run hf:FOLDER`; one of the hub is downloaded."""
    return find_folder(settings.run.removeprefix(FROM_FILES))


def plan_of_files(settings: Prediction) -> PrecisionPlan:
    """Settles the precision of a model without a run, by default float32, and sets JAX up for it.

    Raises:
      UsageError: the policy casts per operation.
    """
    config = with_policy(Config(), settings.policy or "float32")
    plan = plan_precision(config.precision)
    if plan.mode == "autocast":
        raise UsageError(
            f"--policy {settings.policy} casts per operation, and a model without a run casts by module: write "
            "--policy mixed_float16"
        )
    set_up_jax(config, plan)
    return plan
