"""The objective of diffusion: the squared error of what a network tells of the noise in an image.

Shapes: B batch, H height, W width, C channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.policy import Policy
from mpjax.training.noise_levels import TIMES, NoiseSchedule, Prediction, loss_weights, noisy, target_of
from mpjax.training.objective import OUTPUTS, Batch, Prepare, Values
from mpjax.training.softmax_cross_entropy import as_float32


if TYPE_CHECKING:
    from jaxtyping import Array, Key, UInt32

    from mpjax.extend import Objective


_NOISE = 7
"""The number of the random key of noise, after those of augmentations."""


def with_noise(
    prepare: Prepare,
    schedule: NoiseSchedule,
    *,
    prediction: Prediction,
    num_classes: int,
    drop_label: float,
    min_snr: float,
) -> Prepare:
    """Builds the preparation of a batch that adds noise to images in [-1, 1], all in float32.

    In training, each example has a time, noise and a dropped label or not by the key of the step; since the batch of
    all devices is prepared, they do not depend on the number of devices. A micro-batch has noise of its own. In
    evaluation (a key of None), the time and the noise are functions of the stored image alone, and no label is dropped:
    the loss of an example does not depend on the others in its batch, on its place, or on devices.

    Args:
      prepare: augments and normalises a batch.
      schedule: the schedule of noise.
      prediction: what the network predicts.
      num_classes: the number of classes; a dropped label becomes this number. 0: there are no labels.
      drop_label: the probability of dropping a label.
      min_snr: the limit of `loss_weights`; 0: errors of all times count alike.

    Returns:
      `(batch, key) -> batch`, where `image` is noisy; with `time`, int32 [B], `noise_target`, float32 [B, H, W, C], and
      in training with `min_snr` `time_weight`, float32 [B].
    """
    alphas, sigmas = (table.astype(np.float32) for table in (schedule.alphas, schedule.sigmas))
    target = target_of(prediction)
    weights = loss_weights(schedule, prediction, min_snr).astype(np.float32) if min_snr else None

    def prepared(batch: Batch, key: jax.Array | None) -> Batch:
        stored = batch["image"]
        batch = dict(prepare(batch, key))
        images = batch["image"]
        if key is None:
            keys = keys_of_images(stored)
            times = jax.vmap(lambda key: _times(jax.random.fold_in(key, 0), ()))(keys)
            noise = jax.vmap(lambda key: _noise(jax.random.fold_in(key, 1), images.shape[1:]))(keys)
        else:
            of_time, of_noise, of_drop = jax.random.split(jax.random.fold_in(key, _NOISE), 3)
            times, noise = _times(of_time, images.shape[:1]), _noise(of_noise, images.shape)
            if num_classes and drop_label:
                dropped = jax.random.bernoulli(of_drop, drop_label, times.shape)
                batch["label"] = jnp.where(dropped, jnp.int32(num_classes), batch["label"])
            if weights is not None:
                batch["time_weight"] = jnp.asarray(weights)[times]
        alpha, sigma = (jnp.asarray(table)[times].reshape(-1, 1, 1, 1) for table in (alphas, sigmas))
        batch |= {"image": noisy(images, noise, alpha, sigma), "time": times}
        return batch | {"noise_target": target(images, noise, alpha, sigma)}

    return prepared


def _times(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.randint(key, shape, 0, TIMES, jnp.int32)


def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32)


def keys_of_images(images: Array) -> Key[Array, " B"]:
    """Makes a random key of each stored image, uint8 or float32 [B, H, W, C], of its bits and their places alone.

    The sums are of integers modulo 2^32, so that no order of addition changes them.
    """
    bits = images if images.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(images, jnp.uint32)
    bits = bits.reshape(len(images), -1).astype(jnp.uint32)
    places = np.arange(bits.shape[1], dtype=np.uint32)[None]
    mixed = _mixed(bits + _mixed(jnp.asarray(places)))
    words = (jnp.sum(mixed * factor, axis=1, dtype=jnp.uint32) for factor in (jnp.uint32(1), 2 * places + 1))

    def key_of(first: jax.Array, second: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), first), second)

    return jax.vmap(key_of)(*words)


def _mixed(x: UInt32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Changes about half of the bits of a word for each bit that differs: the end of MurmurHash3 (Appleby, 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def diffusion(policy: Policy) -> Objective:
    """Creates the objective of diffusion: `loss` [B], the mean squared error over pixels and channels in float32.

    Batches are those of `with_noise`, with a `label`, int32 [B], if there are classes. The model takes noisy images,
    times and labels, and returns [B, H, W, C], which are the `outputs`. In evaluation, errors of all times count alike.

    Args:
      policy: the policy whose compute dtype the images are cast to; no other code casts them, or the target.
    """

    def objective(model: Any, batch: Batch, key: jax.Array | None) -> Values:
        labels = (batch["label"],) if "label" in batch else ()
        outputs = model(policy.cast_to_compute(batch["image"]), batch["time"], *labels)
        wide = as_float32(outputs)
        errors = wide - batch["noise_target"].astype(wide.dtype)
        losses = jnp.mean(jnp.square(errors), axis=(1, 2, 3))
        if key is not None and "time_weight" in batch:
            losses = losses * batch["time_weight"].astype(losses.dtype)
        return {"loss": losses, OUTPUTS: outputs}

    return objective
