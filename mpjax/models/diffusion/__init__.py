"""Networks that tell noise from images at a time: DiT and a U-Net."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
