"""The learning-rate range test: a rate that grows from update to update, and a suggestion from the losses.

Smith, 2017 (arXiv:1506.01186) proposed the test. The suggested rate is the rate at which the loss falls fastest, as in
Howard and Gugger, 2020 (arXiv:2002.04688).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax


class Point(NamedTuple):
    """An applied update.

    Attributes:
      rate: its learning rate.
      loss: the loss of its batch, before the update.
    """

    rate: float
    loss: float


class Suggestion(NamedTuple):
    """The suggested learning rate, and the smoothed losses behind it.

    Attributes:
      rate: the learning rate at which the smoothed loss falls fastest; None if it falls by no more than noise, or with
        fewer than 3 points.
      lowest: the learning rate of the smallest smoothed loss before training becomes unstable; NaN with fewer points.
      reason: why the rate is suggested, or why none is.
      smoothed: the smoothed loss of each point.
    """

    rate: float | None
    lowest: float
    reason: str
    smoothed: tuple[float, ...]


def growing_rates(lowest: float, highest: float, updates: int) -> optax.Schedule:
    """A schedule that multiplies the rate by one factor per update, from `lowest` at update 0 to `highest` at the last.

    The last one has the number `updates - 1`; later ones get `highest` too. `updates` has to be at least 2.
    """
    factor = np.log(highest / lowest) / (updates - 1)
    return lambda count: jnp.minimum(lowest * jnp.exp(factor * count), highest)


class Watch:
    """Tracks the losses of a running test, to tell when to stop it because they explode.

    Attributes:
      limit: the multiple of the smallest smoothed loss at which to stop.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self._sum = self._weight = 0.0
        self._best = float("inf")

    def explodes(self, loss: float) -> bool:
        """Adds the loss of the next update; True if it is not finite, or if the smoothed loss is too large.

        Too large is above `limit` times the smallest smoothed loss so far, or above 0 if that is negative. The smoothed
        loss is a weighted mean in which each new loss multiplies the weights of all earlier ones by 0.9.
        """
        self._sum, self._weight = _KEPT * self._sum + loss, _KEPT * self._weight + 1
        smoothed = self._sum / self._weight
        self._best = min(self._best, smoothed)
        return not np.isfinite(loss) or smoothed > self.limit * max(self._best, 0.0)


_KEPT = 0.9
"""The weight of the earlier losses in the moving average that decides when to stop."""

_WIDTH = 0.03
"""Standard deviation of the Gaussian that smooths losses, as a fraction of the number of points."""


def suggest(points: Sequence[Point]) -> Suggestion:
    """Suggests the learning rate at which the smoothed loss falls fastest; none if it falls by no more than noise.

    The losses are smoothed over the logarithm of the rate by a Gaussian of 3 % of the points. Training becomes unstable
    where the smoothed loss is above the first one by more than it had fallen below it, and by more than noise. The
    steepest slope is searched between two points: the smallest stable smoothed loss, and the largest one before it.

    Noise is the fall of smoothed losses by chance: 7 of their standard deviations, which 1 in 100 series of pure noise
    exceeds (simulated, for 20 to 400 points). The standard deviation is estimated from the median difference of
    neighbours. Noise is at least the rounding of a float32 loss.

    Args:
      points: finite losses in ascending order of their rates; with fewer than 3, no rate is suggested.
    """
    rates, losses = np.array([p.rate for p in points]), np.array([p.loss for p in points], np.float64)
    if len(points) < 3:
        return Suggestion(None, float("nan"), f"only {len(points)} updates have a finite loss", tuple(losses.tolist()))
    smoothed = _smoothed(losses)
    deviation = 1.4826 * float(np.median(np.abs(np.diff(losses)))) / np.sqrt(2)  # 1.4826: for a normal distribution
    noise = 7 * deviation / np.sqrt(2 * np.sqrt(np.pi) * _width(len(losses)))  # after the Gaussian average
    noise = max(noise, float(np.finfo(np.float32).eps) * float(np.abs(losses).max()))
    fallen = smoothed[0] - np.minimum.accumulate(smoothed)
    unstable = np.flatnonzero(smoothed - smoothed[0] > np.maximum(fallen, noise))
    stable = smoothed[: unstable[0] if len(unstable) else len(points)]
    end = int(np.argmin(stable))
    start = int(np.argmax(stable[: end + 1]))
    lowest = float(rates[end])
    if not stable[start] - stable[end] > noise:
        reason = f"the loss never falls: from {stable[start]:.4g} to {stable[end]:.4g}, with a noise of {noise:.2g}"
        return Suggestion(None, lowest, reason, tuple(smoothed.tolist()))
    slopes = np.gradient(smoothed, np.log(rates))
    steepest = start + int(np.argmin(slopes[start : end + 1]))
    reason = f"the loss falls fastest at {rates[steepest]:.2g} and is smallest at {lowest:.2g}"
    return Suggestion(float(rates[steepest]), lowest, reason, tuple(smoothed.tolist()))


def _smoothed(losses: np.ndarray) -> np.ndarray:
    """Averages losses [n] with Gaussian weights around each point; near the ends, over the points that exist."""
    at = np.arange(len(losses))
    weights = np.exp(-0.5 * np.square((at[:, None] - at) / _width(len(losses))))
    return weights @ losses / weights.sum(axis=1)


def _width(count: int) -> float:
    """The standard deviation, in points, of the Gaussian that smooths `count` losses: at least 1."""
    return max(1.0, _WIDTH * count)
