"""The layouts of each model: the layouts of its family, and mpjax's own for any model."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpjax.models.decoder import weights as decoder
from mpjax.models.encoder import weights as encoder
from mpjax.models.pretrained.layouts import bert, gpt2, resnet, vit
from mpjax.models.pretrained.layouts.entry import WeightMap, own_layout


if TYPE_CHECKING:
    from flax import nnx


# In the module of a family, MODEL is the class of its models. LAYOUTS maps the name of a layout to the function that
# makes the layout for a model of this class.
FAMILIES = (resnet, vit, bert, gpt2, decoder, encoder)


def layouts_of(model: "nnx.Module") -> dict[str, Callable[["nnx.Module"], WeightMap]]:
    """Collects the layouts that a file of this model may have: the function that makes each, by name.

    Every model has "mpjax", mpjax's own layout, as the last.
    """
    known = {}
    for family in FAMILIES:
        if isinstance(model, family.MODEL):
            known |= family.LAYOUTS
    return known | {"mpjax": own_layout}
