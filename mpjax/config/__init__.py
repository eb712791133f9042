"""Settings: files and command line in, one frozen `Config` out. Imports no JAX."""

from mpjax.config.schema import Config


__all__ = ["Config"]
