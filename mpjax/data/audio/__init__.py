"""Sounds: waveforms of files, log-mel features, and the texts and classes of sounds."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
