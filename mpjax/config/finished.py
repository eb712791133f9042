"""Settings of a run that is there, and what of them changes when one asks about it under another policy."""

import dataclasses
import pathlib

from mpjax.config.load import CONFIG_FILE, from_toml
from mpjax.config.schema import Config
from mpjax.errors import UsageError


def config_of_run(folder: pathlib.Path) -> Config:
    """The settings that a run left in its folder.

    Raises:
      UsageError: there is no run.
    """
    if not (folder / CONFIG_FILE).exists():
        raise UsageError(f"no run in {folder} (no {CONFIG_FILE}); wanted the folder that train.py printed")
    return from_toml(folder / CONFIG_FILE)


def with_policy(config: Config, policy: str, rules: dict[str, str] | None = None) -> Config:
    """These settings under another policy; what went with the one they had is as the new one has it.

    Args:
      config: settings.
      policy: a policy's name.
      rules: exceptions; by default those that there are.
    """
    precision = dataclasses.replace(
        config.precision,
        policy=policy,
        rules=config.precision.rules if rules is None else rules,
        mode="auto",
        loss_scale="auto",
        master_weights="auto",
        stochastic_rounding=False,
    )
    return dataclasses.replace(config, precision=precision)
