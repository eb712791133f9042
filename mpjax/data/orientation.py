"""Chooses which images to mirror in an epoch by alternation between epochs, instead of a random key.

Alternating flips: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024 (arXiv:2404.00498).
"""

import dataclasses

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.fields import Fields
from mpjax.errors import UsageError


MIRRORED = "mirrored"
"""The field of a batch, bool [B], that marks the images to mirror. It is never passed to a model or loss."""


@dataclasses.dataclass(frozen=True)
class Alternating:
    """Marks each image to be mirrored in every second epoch; a random bit of the example says if epoch 0 is the first.

    Args:
      seed: the seed of the random bits.
    """

    seed: int

    def of(self, numbers: np.ndarray, epochs: np.ndarray | int) -> dict[str, np.ndarray]:
        """Computes the field `mirrored` of a batch, as a dict with this one field, bool [B]; True: mirror the image.

        It is a pure function of the seed, the number of an example and its epoch.

        Args:
          numbers: the numbers of the examples of a batch, [B].
          epochs: the epoch of each example, [B], or one epoch for all.
        """
        return {MIRRORED: _coin(self.seed, numbers) ^ (epochs % 2 == 1)}


def orientation_of(config: Data, fields: Fields, seed: int) -> Alternating:
    """Builds the rule that chooses the images to mirror. It does not check if `config.alternate_flips` is set.

    Raises:
      UsageError: the data has no images.
    """
    if "image" not in fields:
        raise UsageError(
            f"--data.alternate_flips: '{config.name}' has no images to flip, only {', '.join(fields)}; "
            "write --data.no_alternate_flips"
        )
    return Alternating(seed)


def _coin(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Draws a random bit for each example number in `numbers`, bool [B], independent of the size of the split.

    It is the highest bit of splitmix64 (Steele et al., 2014, doi.org/10.1145/2660193.2660195): example `row` takes draw
    number `row` of a generator that starts from the seed.
    """
    begin = _mixed(np.array([seed], np.uint64))
    return (_mixed(begin + numbers.astype(np.uint64)) >> np.uint64(63)).astype(bool)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Computes draws number `numbers`, uint64, of a splitmix64 generator with state 0; arithmetic is modulo 2**64."""
    bits = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
