"""Mamba-2, a decoder whose layers are recurrences, with settings and weights from a folder of Hugging Face files."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
