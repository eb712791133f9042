"""The mean and the standard deviation by which numbers of a training split are standardised."""

from collections.abc import Iterable, Sequence

import numpy as np

from mpjax.errors import UsageError


def moments_of(called: str, numbers: np.ndarray) -> tuple[float, float]:
    """Computes the mean and the standard deviation of numbers [N], not all alike, by which they are standardised.

    Raises:
      UsageError: float64 does not hold the deviation, whose square is computed: numbers of 1e155 or of 1e-163.
    """
    with np.errstate(over="ignore", under="ignore"):
        mean, std = float(numbers.mean()), float(numbers.std())
    if not (np.isfinite(mean) and np.isfinite(std) and std > 0):
        raise UsageError(
            f"{called}: its numbers, from {numbers.min():g} to {numbers.max():g}, have a mean of {mean:g} and a "
            f"deviation of {std:g} in float64, by which none can be standardised; store them in another unit"
        )
    return mean, std


def target_moments(
    names: Sequence[str], columns: Iterable[np.ndarray], examples: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Computes the mean and the standard deviation of each target of a regression from its numbers, float64 [N].

    Args:
      names: the names of the targets.
      columns: the finite numbers of each.
      examples: what the numbers are of, for messages: rows or examples.

    Raises:
      UsageError: the numbers of a target are all alike, or see `moments_of`.
    """
    targets = list(zip(names, columns, strict=True))
    for name, numbers in targets:
        if numbers.min() == numbers.max():
            raise UsageError(f"target '{name}' is {numbers[0]} in all training {examples}: there is nothing to learn")
    moments = [moments_of(f"target '{name}'", numbers) for name, numbers in targets]
    return tuple(mean for mean, _ in moments), tuple(std for _, std in moments)
