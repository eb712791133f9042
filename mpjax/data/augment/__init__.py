"""Augments batches of images on the device, inside the jitted step."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
