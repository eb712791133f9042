"""Renders a diagnosis as text and as an HTML page."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
