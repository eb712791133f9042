"""Tokenizes texts and cuts them into examples."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
