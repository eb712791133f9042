"""CLIP and SigLIP from Hugging Face files: a tower for images and one for texts, whose vectors are compared."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
