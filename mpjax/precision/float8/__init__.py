"""Float8 products: how operands are scaled and quantised, which layers use them, and the products themselves."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
