"""Precision policies, dtype casts and loss scaling; each works without the others and without Flax."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
