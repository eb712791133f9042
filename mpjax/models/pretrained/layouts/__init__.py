"""The layouts of files of weights, one file for each family of models."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
