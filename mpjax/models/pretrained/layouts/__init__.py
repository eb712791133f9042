"""The layouts of each model: one file for each family, and our own for any model."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpjax.models.pretrained.layouts import bert, gpt2, resnet, vit
from mpjax.models.pretrained.layouts.entry import Layout, own_layout


if TYPE_CHECKING:
    from flax import nnx


# A family's file says for which class of models it is (MODEL), and maps a layout's name to the function that makes it
# for a model of that class (LAYOUTS).
FAMILIES = (resnet, vit, bert, gpt2)


def layouts_of(model: "nnx.Module") -> dict[str, Callable[["nnx.Module"], Layout]]:
    """The layouts in which files of this model may come, by name; our own is the last."""
    known = {}
    for family in FAMILIES:
        if isinstance(model, family.MODEL):
            known |= family.LAYOUTS
    return known | {"mpjax": own_layout}
