"""Maps RegNet to the files of timm."""

import itertools

from mpjax.models.pretrained.layouts.entry import WeightMap, layout_with_norms
from mpjax.models.pretrained.layouts.strides import require_stride
from mpjax.models.regnet import RegNet


MODEL = RegNet


def timm(model: RegNet) -> WeightMap:
    """Builds the layout of `timm.create_model("regnety_004")` and its like.

    Raises:
      UsageError: the first convolution does not halve the image, as that of timm does.
    """
    require_stride(model.stride)
    names = {"stem/conv": "stem.conv", "stem/norm": "stem.bn", "head": "head.fc"}
    number = itertools.count()
    for stage, depth in enumerate(model.depths, 1):
        for index in range(1, depth + 1):
            ours, theirs = f"blocks/{next(number)}", f"s{stage}.b{index}"
            names |= {f"{ours}/conv{nth}": f"{theirs}.conv{nth}.conv" for nth in (1, 2, 3)}
            names |= {f"{ours}/norm{nth}": f"{theirs}.conv{nth}.bn" for nth in (1, 2, 3)}
            names |= {f"{ours}/squeeze/reduce": f"{theirs}.se.fc1", f"{ours}/squeeze/expand": f"{theirs}.se.fc2"}
            names |= {f"{ours}/shortcut/conv": f"{theirs}.downsample.conv"}
            names |= {f"{ours}/shortcut/norm": f"{theirs}.downsample.bn"}
    return layout_with_norms("timm", model, names)


LAYOUTS = {"timm": timm}
