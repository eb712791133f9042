"""Encoders of texts: BERT, RoBERTa and sentence encoders of their shape, with settings and weights from a folder."""

from mpjax.models.encoder.network import Encoder, EncoderClassifier
from mpjax.models.encoder.settings import EncoderSettings, Sentence


__all__ = ["Encoder", "EncoderClassifier", "EncoderSettings", "Sentence"]
