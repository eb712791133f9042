"""ConvNeXt V2 of Hugging Face files (Woo et al., 2023, arXiv:2301.00808): a `ConvNeXt` with the settings of a file."""

from __future__ import annotations

from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.convnext import ConvNeXt
from mpjax.models.vision.settings import ConvNeXtV2Settings


class ConvNeXtV2(ConvNeXt):
    """A `ConvNeXt` of version 2.

    Args:
      settings: the sizes of the network.
      channels: the channels of an image; UsageError if the settings have others.
      num_classes: the number of logits.
    """

    def __init__(self, settings: ConvNeXtV2Settings, *, channels: int, num_classes: int, rngs: nnx.Rngs):
        if channels != settings.channels:
            raise UsageError(
                f"images have {channels} channels, and config.json of the network says num_channels "
                f"{settings.channels}: convert the images, by --data.preprocess FILE.py:NAME"
            )
        super().__init__(
            settings.depths,
            channels=channels,
            width=settings.width,
            num_classes=num_classes,
            patch=settings.patch,
            drop=settings.drop_path,
            version=2,
            epsilon=settings.epsilon,
            rngs=rngs,
        )
        self.settings = settings
