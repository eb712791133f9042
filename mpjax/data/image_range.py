"""Chooses which stored numbers become 0 and 1 in images of more than 8 bits."""

import dataclasses
from collections.abc import Mapping

from mpjax.config.schema import Data
from mpjax.data.fields import Image
from mpjax.data.images.depth import EIGHT
from mpjax.data.table import Column
from mpjax.errors import UsageError


def in_range(columns: Mapping[str, Column], config: Data, set_name: str) -> tuple[dict[str, Column], tuple[str, ...]]:
    """Sets the range of image columns of more than 8 bits: the stored numbers that become 0 and 1.

    `config.range` overrides the range that the files state. Other columns stay unchanged.

    Args:
      columns: the columns of the set, image columns and others.
      config: `range` is empty, or the two numbers that become 0 and 1.
      set_name: the name of the data set.

    Returns:
      A new dict of all columns, and a note for the user about each image column of more than 8 bits.

    Raises:
      UsageError: neither the files nor `config` state the range, or `config` does and no image has more than 8 bits.
    """
    ranged, notes = dict(columns), []
    for name, column in columns.items():
        if not isinstance(column, Image) or column.depth.name == EIGHT.name:
            continue
        depth, advice = column.depth, ""
        if config.range:
            low, high = config.range
            depth = dataclasses.replace(depth, bounds=(low, high))
        elif depth.bounds is None:
            raise UsageError(
                f"data set '{set_name}': {name}: {depth.name}, whose range the files do not say; write --data.range "
                "LOW HIGH, the numbers that become 0 and 1, as in --data.range 0 4095 (0 1: as they are stored)"
            )
        else:
            advice = "; for another range write --data.range LOW HIGH"
        ranged[name] = dataclasses.replace(column, depth=depth)
        notes.append(f"'{set_name}': {name}: {depth.told()}{advice}")
    if config.range and not notes:
        raise UsageError(
            f"--data.range {' '.join(f'{bound:g}' for bound in config.range)}: '{set_name}' has no image files of more "
            "than 8 bits per channel; 8 bits are scaled by 255 and arrays of floats are taken as they are: leave it out"
        )
    return ranged, tuple(notes)
