"""Diagnoses whether precision causes a NaN or a loss of accuracy, in which module, and what to change."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
