"""Code that settings name: what a stored run names is executed only if the user said so."""

import pathlib

from mpjax.config.schema import Config
from mpjax.errors import UsageError


def code_of(config: Config) -> dict[str, str]:
    """The settings that name code outside mpjax, by name."""
    named = {"model.name": config.model.name, "data.preprocess": config.data.preprocess}
    return {name: value for name, value in named.items() if ":" in value and not _is_own(value)}


def require_trust(stored: Config, where: pathlib.Path, *, trusted: bool, said: Config | None = None) -> None:
    """Raises UsageError where a stored run names code that the user neither trusts nor named.

    Args:
      stored: its settings.
      where: its folder.
      trusted: whether `--trust_code` was given.
      said: the settings of this command line alone.
    """
    said_code = code_of(said) if said else {}
    untrusted = [f"{name} {value}" for name, value in code_of(stored).items() if said_code.get(name) != value]
    if untrusted and not trusted:
        raise UsageError(
            f"the run in {where} names code outside mpjax, which would be executed here: {', '.join(untrusted)}; "
            "read it, and if you trust it write --trust_code"
        )


def _is_own(value: str) -> bool:
    module = value.rpartition(":")[0]
    return not module.endswith(".py") and (module == "mpjax" or module.startswith("mpjax."))


def is_of_a_run(file: pathlib.Path) -> bool:
    """Whether a settings file is that of a run's folder, and not one that somebody wrote."""
    return any((file.parent / name).exists() for name in ("checkpoints", "environment.json", "metrics.jsonl"))
