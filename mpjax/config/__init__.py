"""The settings of runs and commands: TOML files and the command line become one frozen `Config`. Imports no JAX."""

from mpjax.config.durations import Duration
from mpjax.config.load import from_toml, load_config
from mpjax.config.save import save_config, to_toml
from mpjax.config.schema import Config


__all__ = ["Config", "Duration", "from_toml", "load_config", "save_config", "to_toml"]
