"""Runs training: the loop of steps, callbacks, checkpoints, interruption, and runs of several processes."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
