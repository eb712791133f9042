"""The settings of runs and commands: TOML files and the command line become one frozen `Config`. Imports no JAX."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
