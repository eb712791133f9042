"""Predicts whether a run fits on a GPU and how fast it can be, by compiling its step without the GPU."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
