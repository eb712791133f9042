"""Encoders of texts: BERT, RoBERTa, ModernBERT and sentence encoders, with settings and weights from a folder."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
