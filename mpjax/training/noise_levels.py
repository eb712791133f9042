"""The schedules of diffusion: how much of an image and how much noise there is at each time.

A noisy image at time t is alpha[t] x + sigma[t] eps, of an image x in [-1, 1] and normal noise eps, with alpha^2 +
sigma^2 = 1 (Ho et al., 2020, arXiv:2006.11239). A network predicts eps, or v = alpha eps - sigma x (Salimans & Ho,
2022, arXiv:2202.00512). Tables are computed in float64 on the host; arithmetic is in float32 under every policy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np


TIMES = 1000
"""The number of times: 0 has almost no noise, `TIMES` - 1 almost nothing else."""

ScheduleOfNoise = Literal["cosine", "linear"]
Prediction = Literal["v", "eps"]


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """The share of the image and of the noise at each time.

    Attributes:
      alphas: factors of the image, float64 [TIMES], falling.
      sigmas: factors of the noise, float64 [TIMES], growing.
    """

    alphas: np.ndarray
    sigmas: np.ndarray

    @property
    def ratios(self) -> np.ndarray:
        """The ratio of signal to noise at each time, alpha^2 / sigma^2, float64 [TIMES]."""
        return np.square(self.alphas / self.sigmas)


@functools.cache
def noise_schedule(name: ScheduleOfNoise) -> NoiseSchedule:
    """Computes the schedule of a name from the variance beta that each time adds.

    linear: beta grows from 1e-4 to 0.02 (Ho et al., section 4). cosine: the product of 1 - beta falls as
    cos^2((t / TIMES + s) / (1 + s) pi / 2), with s = 0.008 and beta at most 0.999 (Nichol & Dhariwal, 2021,
    arXiv:2102.09672, section 3.2).
    """
    if name == "linear":
        betas = np.linspace(1e-4, 0.02, TIMES)
    else:
        offset = 0.008
        kept = np.square(np.cos((np.arange(TIMES + 1) / TIMES + offset) / (1 + offset) * np.pi / 2))
        betas = np.minimum(1 - kept[1:] / kept[:-1], 0.999)
    kept = np.cumprod(1 - betas)
    return NoiseSchedule(np.sqrt(kept), np.sqrt(1 - kept))


def noisy(image: Any, noise: Any, alpha: Any, sigma: Any) -> Any:
    """Computes the noisy image alpha x + sigma eps."""
    return alpha * image + sigma * noise


def target_of(prediction: Prediction) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns the function `(image, noise, alpha, sigma) -> target` of what a network is to predict."""
    if prediction == "eps":
        return lambda image, noise, alpha, sigma: noise
    return lambda image, noise, alpha, sigma: alpha * noise - sigma * image


def image_of(prediction: Prediction) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns the function `(noisy, output, alpha, sigma) -> image` of the image that an output of a network means."""
    if prediction == "eps":
        return lambda x, output, alpha, sigma: (x - sigma * output) / alpha
    return lambda x, output, alpha, sigma: alpha * x - sigma * output


def loss_weights(schedule: NoiseSchedule, prediction: Prediction, limit: float) -> np.ndarray:
    """Computes the weight of the squared error at each time by min-SNR, float64 [TIMES].

    Hang et al., 2023 (arXiv:2303.09556): the error of the image it stands for counts min(SNR, `limit`) times, which
    is min(SNR, limit) / SNR for eps and min(SNR, limit) / (SNR + 1) for v.
    """
    ratios = schedule.ratios
    return np.minimum(ratios, limit) / (ratios if prediction == "eps" else ratios + 1)
