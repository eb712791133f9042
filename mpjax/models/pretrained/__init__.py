"""Loads pretrained weights from safetensors files into a model and exports them, in the right precision."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
