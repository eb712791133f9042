"""The commands of mpjax: each module has the function that runs one command, or a step that several commands share."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
