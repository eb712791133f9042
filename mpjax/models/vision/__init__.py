"""Networks for images from Hugging Face files: ViT, DeiT, DINOv2 and ConvNeXt V2."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
