"""Decodes images and masks on the host."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
