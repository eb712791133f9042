"""Decides which images of an epoch are mirrored, where that follows from the epoch and not from a random key.

Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024 (arXiv:2404.00498): alternating flips.
"""

import dataclasses

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.fields import Fields
from mpjax.errors import UsageError


MIRRORED = "mirrored"
"""The field of a batch, bool [B], that says which images to mirror; no model and no loss is given it."""


@dataclasses.dataclass(frozen=True)
class Alternating:
    """Mirrors each image in every second epoch, beginning with the first or the second epoch.

    Args:
      seed: the seed that decides for each example in which of the two it begins.
    """

    seed: int

    def of(self, rows: np.ndarray, epochs: np.ndarray | int) -> dict[str, np.ndarray]:
        """Returns `mirrored`, a pure function of the seed, the example and its epoch."""
        return {MIRRORED: _coin(self.seed, rows) ^ (epochs % 2 == 1)}


def orientation_of(config: Data, fields: Fields, seed: int) -> Alternating:
    """Returns the orientation of the images of a run with alternating flips.

    Raises:
      UsageError: the data has no images.
    """
    if "image" not in fields:
        raise UsageError(
            f"--data.alternate_flips: '{config.name}' has no images to flip, only {', '.join(fields)}; "
            "write --data.no_alternate_flips"
        )
    return Alternating(seed)


def _coin(seed: int, rows: np.ndarray) -> np.ndarray:
    """Returns True or False for each example, bool [B], with no memory of a split's size.

    It is the highest bit of splitmix64 (Steele et al., 2014, doi.org/10.1145/2660193.2660195), example `row` being draw
    number `row` of a generator that the seed begins.
    """
    begin = _mixed(np.array([seed], np.uint64))
    return (_mixed(begin + rows.astype(np.uint64)) >> np.uint64(63)).astype(bool)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Returns the draws number `numbers`, uint64, of splitmix64; it wraps around at 2**64."""
    bits = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
