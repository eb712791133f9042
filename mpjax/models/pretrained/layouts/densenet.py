"""Maps DenseNet to the files of timm and torchvision."""

import itertools

from mpjax.models.densenet import DenseNet
from mpjax.models.pretrained.layouts.entry import WeightMap, layout_with_norms


MODEL = DenseNet


def timm(model: DenseNet) -> WeightMap:
    """Builds the layout of `timm.create_model("densenet121")`, the same as torchvision's.

    Older files of torchvision have a dot in the names of the layers of a block, `norm.1`.
    """
    names = {"stem/conv": "features.conv0", "stem/norm": "features.norm0"}
    names |= {"norm": "features.norm5", "head": "classifier"}
    number = itertools.count()
    for block, depth in enumerate(model.depths, 1):
        if block > 1:
            ours, theirs = f"layers/{next(number)}", f"features.transition{block - 1}"
            names |= {f"{ours}/norm": f"{theirs}.norm", f"{ours}/conv": f"{theirs}.conv"}
        for index in range(1, depth + 1):
            ours, theirs = f"layers/{next(number)}", f"features.denseblock{block}.denselayer{index}"
            names |= {f"{ours}/{layer}": f"{theirs}.{layer}" for layer in ("norm1", "conv1", "norm2", "conv2")}
    renamed = tuple((f".{layer}.{nth}.", f".{layer}{nth}.") for layer in ("norm", "conv") for nth in (1, 2))
    return layout_with_norms("timm", model, names, renamed=renamed)


LAYOUTS = {"timm": timm}
