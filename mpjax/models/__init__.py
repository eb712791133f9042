"""Networks in Flax NNX, plain enough to read as a tutorial: settings in, module out."""

from mpjax.models.build import build_model


__all__ = ["build_model"]
