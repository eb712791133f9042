"""Maps ResNet to the files of Hugging Face transformers (`ResNetForImageClassification`), timm and torchvision."""

import itertools
from collections.abc import Iterator

from mpjax.models.pretrained.layouts.entry import WeightMap, layout_with_norms
from mpjax.models.resnet import ResNet


MODEL = ResNet


def huggingface_resnet(model: ResNet) -> WeightMap:
    """Builds the layout of `ResNetForImageClassification`.

    Its bottlenecks stride in the 3x3 convolution, as ours do.
    """
    embedder = "resnet.embedder.embedder"
    names = {
        "stem/conv": f"{embedder}.convolution",
        "stem/norm": f"{embedder}.normalization",
        "head": "classifier.1",
    }
    for block, stage, index in _blocks(model):
        layer = f"resnet.encoder.stages.{stage}.layers.{index}"
        names[f"{block}/shortcut/conv"] = f"{layer}.shortcut.convolution"
        names[f"{block}/shortcut/norm"] = f"{layer}.shortcut.normalization"
        for nth in range(3):
            names[f"{block}/conv{nth + 1}"] = f"{layer}.layer.{nth}.convolution"
            names[f"{block}/norm{nth + 1}"] = f"{layer}.layer.{nth}.normalization"
    return layout_with_norms("huggingface", model, names, base="resnet.")


def timm(model: ResNet) -> WeightMap:
    """Builds the layout of ResNets in timm, such as `timm.create_model("resnet50")`, the same as torchvision's."""
    names = {"stem/conv": "conv1", "stem/norm": "bn1", "head": "fc"}
    for block, stage, index in _blocks(model):
        layer = f"layer{stage + 1}.{index}"
        names[f"{block}/shortcut/conv"] = f"{layer}.downsample.0"
        names[f"{block}/shortcut/norm"] = f"{layer}.downsample.1"
        for nth in range(1, 4):
            names[f"{block}/conv{nth}"] = f"{layer}.conv{nth}"
            names[f"{block}/norm{nth}"] = f"{layer}.bn{nth}"
    return layout_with_norms("timm", model, names)


LAYOUTS = {"huggingface": huggingface_resnet, "timm": timm}


def _blocks(model: ResNet) -> Iterator[tuple[str, int, int]]:
    """Yields `(path, stage, index within the stage)` for each block; numbers start at 0.

    A stage is a run of consecutive blocks of one width.
    """
    widths = [block.conv1.kernel.get_value().shape[-1] for block in model.blocks]
    number = itertools.count()
    for stage, (_, row) in enumerate(itertools.groupby(widths)):
        for index, _ in enumerate(row):
            yield f"blocks/{next(number)}", stage, index
