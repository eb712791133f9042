"""T5, v1.1, FLAN-T5 and mT5: encoders and decoders of texts, with settings and weights from a folder."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
