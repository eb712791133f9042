"""Encoders of texts: BERT, RoBERTa and sentence encoders of their shape, with settings and weights from a folder."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
