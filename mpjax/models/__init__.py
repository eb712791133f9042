"""Networks in Flax NNX, written to be read as a tutorial; `build_model` builds one from settings."""

from mpjax.models.build import build_model


__all__ = ["build_model"]
