"""The encoder, or the classifier, that settings are of."""

from __future__ import annotations

from typing import Any

from flax import nnx

from mpjax.models.encoder.modernbert import ModernBERT, ModernBERTClassifier
from mpjax.models.encoder.modernbert_settings import ModernBERTSettings
from mpjax.models.encoder.network import Encoder, EncoderClassifier
from mpjax.models.encoder.settings import EncoderSettings


AnyEncoder = Encoder | ModernBERT
AnyClassifier = EncoderClassifier | ModernBERTClassifier


def make_encoder(settings: EncoderSettings | ModernBERTSettings, *, rngs: nnx.Rngs, **options: Any) -> AnyEncoder:
    """Builds the encoder that makes a vector of a text; `options` are the other arguments of its class."""
    if isinstance(settings, ModernBERTSettings):
        return ModernBERT(settings, rngs=rngs, **options)
    return Encoder(settings, rngs=rngs, **options)


def make_classifier(
    settings: EncoderSettings | ModernBERTSettings, *, num_classes: int, rngs: nnx.Rngs, **options: Any
) -> AnyClassifier:
    """Builds the encoder with a classifier; `options` are the other arguments of its class."""
    if isinstance(settings, ModernBERTSettings):
        return ModernBERTClassifier(settings, num_classes=num_classes, rngs=rngs, **options)
    return EncoderClassifier(settings, num_classes=num_classes, rngs=rngs, **options)
