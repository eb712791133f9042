"""Draws images from noise with a diffusion network: DDIM (Song et al., 2020, arXiv:2010.02502), from eta 0 to 1.

Arithmetic is in float32 under every policy; the network runs under its own. Each image's noise follows from its key
alone, so that an image does not depend on the others in its batch.

Shapes: B batch, H height, W width, C channels, S steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision.policy import Policy
from mpjax.training.noise_levels import TIMES, NoiseSchedule, Prediction, image_of


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Bool, Float, Int, Key


class DdimSteps(NamedTuple):
    """The numbers of each step, from noise to image.

    Attributes:
      times: int32 [S], from `TIMES` - 1 to 0; of one step, `TIMES` - 1.
      alphas: float32 [S], the share of the image at each time.
      sigmas: float32 [S], the share of the noise.
      next_alphas: float32 [S], the share of the image after the step; at the end 1.
      kept: float32 [S], the share of the noise that was there, after the step; at the end 0.
      fresh: float32 [S], the share of new noise after the step; with an eta of 0, and at the end, 0.
    """

    times: Int[np.ndarray, " S"]
    alphas: Float[np.ndarray, " S"]
    sigmas: Float[np.ndarray, " S"]
    next_alphas: Float[np.ndarray, " S"]
    kept: Float[np.ndarray, " S"]
    fresh: Float[np.ndarray, " S"]


def ddim_steps(schedule: NoiseSchedule, count: int, eta: float) -> DdimSteps:
    """Computes the numbers of `count` steps, at times as far apart as they can be, in float64.

    Args:
      schedule: the schedule of noise that the network has learned.
      count: S.
      eta: the share of the noise of DDPM (Song et al., equation 16): 0 adds none, and the images follow from the first
        noise; 1 is DDPM, at these times.

    Raises:
      UsageError: `count` is not in 1 to `TIMES`, or `eta` not in [0, 1].
    """
    if not 1 <= count <= TIMES:
        raise UsageError(f"{count} steps of the sampler: wanted 1 to {TIMES}, the number of times")
    if not 0 <= eta <= 1:
        raise UsageError(f"eta {eta}: wanted 0 (DDIM) to 1 (DDPM)")
    times = np.round(np.linspace(TIMES - 1, 0, count)).astype(np.int32)
    alphas, sigmas = schedule.alphas[times], schedule.sigmas[times]
    next_alphas, next_sigmas = np.append(alphas[1:], 1.0), np.append(sigmas[1:], 0.0)
    fresh = eta * (next_sigmas / sigmas) * np.sqrt(np.maximum(1 - np.square(alphas / next_alphas), 0))
    kept = np.sqrt(np.maximum(np.square(next_sigmas) - np.square(fresh), 0))
    numbers = (alphas, sigmas, next_alphas, kept, fresh)
    return DdimSteps(times, *(number.astype(np.float32) for number in numbers))


class DrawnImages(NamedTuple):
    """Images, and whether each output of the network for them was finite."""

    image: Float[Array, "B H W C"]
    finite: Bool[Array, " B"]


def draw(
    denoise: Callable[[jax.Array, jax.Array], jax.Array],
    keys: Key[Array, " B"],
    shape: tuple[int, int, int],
    steps: DdimSteps,
    *,
    prediction: Prediction,
) -> DrawnImages:
    """Draws images in [-1, 1] in one loop, float32 [B, H, W, C].

    The image that each output stands for is cut to [-1, 1], and the noise that is left follows from it.

    Args:
      denoise: `(noisy, times) -> outputs` of the network, float32 [B, H, W, C] and int32 [B] to [B, H, W, C].
      keys: the random key of each image.
      shape: H, W and C.
      steps: the numbers of the steps.
      prediction: what the network predicts.
    """
    adds, image_in = bool(np.any(steps.fresh)), image_of(prediction)

    def noise(number: Any) -> jax.Array:
        return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32))(keys)

    def step(carry: tuple[jax.Array, jax.Array], row: tuple) -> tuple[tuple[jax.Array, jax.Array], None]:
        (x, finite), (number, (time, alpha, sigma, next_alpha, kept, fresh)) = carry, row
        output = denoise(x, jnp.full(x.shape[:1], time)).astype(jnp.float32)
        # Cut to [-1, 1], an infinite output would look like an image.
        finite &= jnp.all(jnp.isfinite(output), axis=(1, 2, 3))
        image = jnp.clip(image_in(x, output, alpha, sigma), -1, 1)
        x = next_alpha * image + kept * ((x - alpha * image) / sigma)
        return ((x + fresh * noise(number) if adds else x), finite), None

    count = len(steps.times)
    numbers = jnp.arange(1, count + 1, dtype=jnp.int32)
    start = noise(0), jnp.ones(keys.shape, bool)
    (x, finite), _ = jax.lax.scan(step, start, (numbers, jax.tree.map(jnp.asarray, steps)))
    return DrawnImages(x, finite)


def drawing(
    policy: Policy,
    shape: tuple[int, int, int],
    steps: DdimSteps,
    *,
    prediction: Prediction,
    num_classes: int,
    guidance: float,
    seed: int,
) -> Callable[[nnx.Module, dict[str, jax.Array]], dict[str, jax.Array]]:
    """Builds the function `(model, batch) -> {"image", "finite"}` that draws the images of a batch.

    Args:
      policy: the policy whose compute dtype the noisy images are cast to.
      shape: H, W and C of the images.
      steps: as for `draw`.
      prediction: as for `draw`.
      num_classes: the number of classes; 0: the model takes no labels.
      guidance: the weight of the label, w, in (1 - w) f(no label) + w f(label) (Ho & Salimans, 2022,
        arXiv:2207.12598): 1 is the output for the label, 0 the one without; others call the model for both.
      seed: the seed; an image follows from it and from its number.

    Returns:
      A function of a model and a batch with `number`, int32 [B], and, if there are classes, `label`, int32 [B].
    """

    def drawn(model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(batch["number"])
        graph, state = nnx.split(model)  # a module of the outer trace cannot be called in the loop

        def outputs(x: jax.Array, times: jax.Array, *labels: jax.Array) -> jax.Array:
            network: Any = nnx.merge(graph, state)
            return network(policy.cast_to_compute(x), times, *labels).astype(jnp.float32)

        def denoise(x: jax.Array, times: jax.Array) -> jax.Array:
            if not num_classes:
                return outputs(x, times)
            none = jnp.full(times.shape, num_classes, jnp.int32)
            if guidance in (0, 1):
                return outputs(x, times, batch["label"] if guidance else none)
            both = outputs(*(jnp.concatenate(pair) for pair in ((x, x), (times, times), (batch["label"], none))))
            labelled, unlabelled = jnp.split(both, 2)
            return unlabelled + guidance * (labelled - unlabelled)

        return draw(denoise, keys, shape, steps, prediction=prediction)._asdict()

    return drawn
