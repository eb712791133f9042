"""Casts per operation: `autocast` runs any JAX function with each operation in the dtype that lists say."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
