"""The network that settings are of; its file is imported when it is built, so that a run imports one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.vision.settings import ConvNeXtV2Settings, Settings, SwinSettings, TowerSettings


if TYPE_CHECKING:
    from mpjax.models.vision.convnextv2 import ConvNeXtV2
    from mpjax.models.vision.network import VisionTransformer
    from mpjax.models.vision.swin import Swin
    from mpjax.models.vision.tower import TowerClassifier

    AnyVision = VisionTransformer | ConvNeXtV2 | Swin | TowerClassifier


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
      UsageError: the images do not fit the settings, or a ConvNeXt or a Swin shall have its blocks in one loop.
    """
    sizes: dict[str, Any] = {"image_shape": image_shape, "num_classes": num_classes}
    match settings:
        case ConvNeXtV2Settings():
            from mpjax.models.vision.convnextv2 import ConvNeXtV2

            _refuse_loop("ConvNeXt", scan_blocks)
            return ConvNeXtV2(settings, channels=image_shape[2], num_classes=num_classes, rngs=rngs)
        case SwinSettings():
            from mpjax.models.vision.swin import Swin

            _refuse_loop("Swin", scan_blocks)
            return Swin(settings, **sizes, rngs=rngs)
        case TowerSettings():
            from mpjax.models.vision.tower import TowerClassifier

            return TowerClassifier(settings, **sizes, scan_blocks=scan_blocks, rngs=rngs)
        case _:
            from mpjax.models.vision.network import VisionTransformer

            return VisionTransformer(settings, **sizes, scan_blocks=scan_blocks, rngs=rngs)


def _refuse_loop(kind: str, scan_blocks: bool) -> None:
    if scan_blocks:
        raise UsageError(
            f"--model.scan_blocks: the blocks of a {kind} are of several widths: write --model.no_scan_blocks",
            repair={"model.scan_blocks": False},
        )
