"""Writes the results of a run: console output, files and plots."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
