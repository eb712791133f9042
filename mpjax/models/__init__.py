"""Networks in Flax NNX, written to be read as a tutorial; `build_model` builds one from settings."""

from mpjax.models.build import advice_on, build_model


__all__ = ["advice_on", "build_model"]
