"""Networks for images from Hugging Face files: ViT to DINOv3, Swin, ConvNeXt V2, and the towers of CLIP and SigLIP."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
