"""Networks in Flax NNX, written to be read as a tutorial; `build_model` builds one from settings."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
