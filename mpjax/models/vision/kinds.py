"""The network that settings are of."""

from __future__ import annotations

from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.vision.convnextv2 import ConvNeXtV2
from mpjax.models.vision.network import VisionTransformer
from mpjax.models.vision.settings import ConvNeXtV2Settings, Settings


AnyVision = VisionTransformer | ConvNeXtV2


def make_network(
    settings: Settings,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    scan_blocks: bool = False,
    rngs: nnx.Rngs,
) -> AnyVision:
    """Builds the network for images of `image_shape`: height, width and channels.

    Raises:
      UsageError: the images do not fit the settings, or a ConvNeXt shall have its blocks in one loop.
    """
    if isinstance(settings, ConvNeXtV2Settings):
        if scan_blocks:
            raise UsageError(
                "--model.scan_blocks: the blocks of a ConvNeXt are of several widths: write --model.no_scan_blocks",
                repair={"model.scan_blocks": False},
            )
        return ConvNeXtV2(settings, channels=image_shape[2], num_classes=num_classes, rngs=rngs)
    return VisionTransformer(
        settings, image_shape=image_shape, num_classes=num_classes, scan_blocks=scan_blocks, rngs=rngs
    )
