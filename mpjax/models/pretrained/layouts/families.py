"""The layouts of each model: the layouts of its family, and mpjax's own for any model."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpjax.models.pretrained.layouts.entry import WeightMap, own_layout


if TYPE_CHECKING:
    from flax import nnx


_LAYOUTS_OF = {
    "mpjax.models.resnet": "mpjax.models.pretrained.layouts.resnet",
    "mpjax.models.efficientnet": "mpjax.models.pretrained.layouts.inverted_residuals",
    "mpjax.models.mobilenetv3": "mpjax.models.pretrained.layouts.inverted_residuals",
    "mpjax.models.regnet": "mpjax.models.pretrained.layouts.regnet",
    "mpjax.models.densenet": "mpjax.models.pretrained.layouts.densenet",
    "mpjax.models.vit": "mpjax.models.pretrained.layouts.vit",
    "mpjax.models.bert": "mpjax.models.pretrained.layouts.bert",
    "mpjax.models.gpt2": "mpjax.models.pretrained.layouts.gpt2",
    "mpjax.models.decoder.network": "mpjax.models.decoder.weights",
    "mpjax.models.encoder.network": "mpjax.models.encoder.weights",
    "mpjax.models.encoder.modernbert": "mpjax.models.encoder.modernbert_weights",
    "mpjax.models.image_text.network": "mpjax.models.image_text.weights",
    "mpjax.models.vision.network": "mpjax.models.vision.weights",
    "mpjax.models.vision.convnextv2": "mpjax.models.vision.convnextv2_weights",
    "mpjax.models.mamba2.network": "mpjax.models.mamba2.weights",
    "mpjax.models.vision.tower": "mpjax.models.vision.tower_weights",
    "mpjax.models.vision.swin": "mpjax.models.vision.swin_weights",
    "mpjax.models.t5.network": "mpjax.models.t5.weights",
    "mpjax.models.whisper.network": "mpjax.models.whisper.weights",
}
"""The file with the layouts of a family, by the file with its networks; it is imported for models of the family alone.

There, MODEL is the class of the models, or a tuple of classes, and LAYOUTS maps the name of a layout to the function
that makes the layout for a model of this class.
"""


def layouts_of(model: "nnx.Module") -> dict[str, Callable[["nnx.Module"], WeightMap]]:
    """Collects the layouts that a file of this model may have: the function that makes each, by name.

    Every model has "mpjax", mpjax's own layout, as the last.
    """
    known = {}
    for file in (_LAYOUTS_OF[kind.__module__] for kind in type(model).__mro__ if kind.__module__ in _LAYOUTS_OF):
        family = importlib.import_module(file)
        if isinstance(model, family.MODEL):
            known |= family.LAYOUTS
    return known | {"mpjax": own_layout}
