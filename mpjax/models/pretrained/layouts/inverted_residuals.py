"""Maps EfficientNet and MobileNetV3 to the files of timm."""

import dataclasses
import itertools

from mpjax.models.efficientnet import EfficientNet
from mpjax.models.mobilenetv3 import MobileNetV3
from mpjax.models.pretrained.layouts.entry import WeightMap, layout_with_norms
from mpjax.models.pretrained.layouts.strides import require_stride
from mpjax.models.resnet import identity


MODEL = (EfficientNet, MobileNetV3)


def timm(model: EfficientNet | MobileNetV3) -> WeightMap:
    """Builds the layout of `timm.create_model("efficientnet_b0")`, `mobilenetv3_small_100` and their like.

    Raises:
      UsageError: the first convolution does not halve the image, as that of timm does.
    """
    require_stride(model.stride)
    names = {"stem/conv": "conv_stem", "stem/norm": "bn1", "head": "classifier"}
    if isinstance(model, EfficientNet):
        names |= {"last/conv": "conv_head", "last/norm": "bn2"}
    else:
        last = f"blocks.{len(model.depths)}.0"
        names |= {"last/conv": f"{last}.conv", "last/norm": f"{last}.bn1", "hidden": "conv_head"}
    number = itertools.count()
    for stage, depth in enumerate(model.depths):
        for index in range(depth):
            ours = next(number)
            names |= _block(f"blocks/{ours}", f"blocks.{stage}.{index}", model.blocks[ours].expand is not identity)
    return dataclasses.replace(layout_with_norms("timm", model, names), others=OTHERS)


OTHERS = {"tf_": "pads as TensorFlow does and adds 0.001 to variances"}
"""The networks with the weights of the papers' authors, such as `tf_efficientnet_b0`."""

LAYOUTS = {"timm": timm}


def _block(ours: str, theirs: str, expands: bool) -> dict[str, str]:
    """The names of the layers of a block; timm numbers its norms, and names the last convolution by its place."""
    layers = ["expand", "depthwise", "project"][not expands :]
    convs = ["conv_pw", "conv_dw", "conv_pwl"] if expands else ["conv_dw", "conv_pw"]
    names = {}
    for number, (layer, conv) in enumerate(zip(layers, convs, strict=True), 1):
        names |= {f"{ours}/{layer}/conv": f"{theirs}.{conv}", f"{ours}/{layer}/norm": f"{theirs}.bn{number}"}
    squeeze = {f"{ours}/squeeze/{layer}": f"{theirs}.se.conv_{layer}" for layer in ("reduce", "expand")}
    return names | squeeze
