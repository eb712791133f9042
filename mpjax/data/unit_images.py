"""Images of which a network learns to draw others: every pixel is between 0 and 1, or in 0..255."""

import dataclasses
from typing import Any

import numpy as np

from mpjax.data.examples import Source
from mpjax.data.fields import Fields, Image, called
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class UnitImage(Image):
    """The field of an image whose floating-point pixels are in [0, 1], so that scaled to [-1, 1] they fill it."""

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks pixels as `Image` does.

        Raises:
          UsageError: as `Image`, or a floating-point pixel is below 0 or above 1.
        """
        value = super().settle(name, value)
        if value.dtype != np.uint8 and value.size and (value.min() < 0 or value.max() > 1):
            raise UsageError(
                f"{called(name, self)}: pixels from {value.min():.6g} to {value.max():.6g}; --task diffusion wants "
                "uint8 in 0..255 or floating point in [0, 1], which it scales to [-1, 1]; scale them in the "
                "function of --data.preprocess, or write --data.range for images of more than 8 bits"
            )
        return value


def with_unit_images(source: Source) -> Source:
    """Returns the source of a diffusion: its images are checked to be in [0, 1], and a note says how they are scaled.

    Raises:
      UsageError: it has other fields than an image and perhaps a label, or no image.
    """
    fields: Fields = source.fields
    image: Any = fields.get("image")
    if not isinstance(image, Image) or not set(fields) <= {"image", "label"}:
        raise UsageError(
            f"data set '{source.name}' has the fields {', '.join(fields)}; --task diffusion wants image, and label if "
            "the images have classes"
        )
    unit = UnitImage(image.shape, depth=image.depth, origin=image.origin)
    labels = "" if "label" in fields else "; they have no labels"
    note = f"images are scaled from [0, 1] to [-1, 1], in place of --data.mean and --data.std{labels}"
    return dataclasses.replace(source, fields={**fields, "image": unit}, notes=(*source.notes, note))
