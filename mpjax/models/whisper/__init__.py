"""Whisper: an encoder of sounds and a decoder of texts, with settings and weights from a folder."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
