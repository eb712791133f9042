"""Continues texts with a language model, token by token, with the keys and values of earlier tokens in a cache."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
