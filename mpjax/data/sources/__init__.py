"""The sources of examples, one file for each kind of data set."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
