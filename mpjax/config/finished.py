"""Settings of a run that is there, and what of them changes when one asks about it under another policy."""

import dataclasses
import pathlib

from mpjax.config.load import CONFIG_FILE, from_toml
from mpjax.config.schema import Config
from mpjax.config.trust import require_trust
from mpjax.errors import UsageError


def config_of_run(folder: pathlib.Path, *, trust_code: bool = False) -> Config:
    """The settings that a run left in its folder.

    Args:
      folder: of the run.
      trust_code: whether code that it names may be executed.

    Raises:
      UsageError: there is no run, or it names code outside mpjax that is not trusted.
    """
    if not (folder / CONFIG_FILE).exists():
        raise UsageError(f"no run in {folder} (no {CONFIG_FILE}); wanted the folder that train.py printed")
    config = from_toml(folder / CONFIG_FILE)
    require_trust(config, folder, trusted=trust_code)
    return config


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
