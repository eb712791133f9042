"""A U-Net whose Dice loss overflows in float16: from NaN to a verdict to a run that learns.

The loss sums probabilities and their squares over all pixels of a batch, in its compute dtype. A batch here has 294,912
of them, and the largest float16 number is 65,504.

- The loop is hand-written: `mpjax.apply_policy`, an optimizer in `mpjax.dynamic_loss_scaling`, and `mpjax.scale_loss`.
- `mpjax.diagnose` says what is wrong with the first step, and where.
- `found.repaired_policy` is the policy with the rules that the diagnosis proposes. With it, the same loop learns as in
  float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import mpjax


SIZE = 96
BATCH = 16


class UNet(nnx.Module):
    """Two levels down, two up, with skip connections; the model sets no dtypes."""

    def __init__(self, classes: int, width: int = 8, *, rngs: nnx.Rngs):
        self.down1 = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.down2 = nnx.Conv(width, width, (3, 3), rngs=rngs)
        self.middle = nnx.Conv(width, width, (3, 3), rngs=rngs)
        self.up2 = nnx.Conv(2 * width, width, (3, 3), rngs=rngs)
        self.up1 = nnx.Conv(2 * width, width, (3, 3), rngs=rngs)
        self.out = nnx.Conv(width, classes, (1, 1), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images [B, H, W, 1] to logits [B, H, W, classes]; H and W are multiples of 4."""
        fine = nnx.relu(self.down1(images))
        coarse = nnx.relu(self.down2(_halved(fine)))
        x = nnx.relu(self.middle(_halved(coarse)))
        x = nnx.relu(self.up2(jnp.concatenate([_doubled(x), coarse], axis=-1)))
        x = nnx.relu(self.up1(jnp.concatenate([_doubled(x), fine], axis=-1)))
        return self.out(x)


def _halved(x: jax.Array) -> jax.Array:
    return nnx.max_pool(x, (2, 2), strides=(2, 2))


def _doubled(x: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


class DiceBCE(nnx.Module):
    """Dice loss and binary cross-entropy, computed in `dtype`, which a policy sets."""

    def __init__(self, dtype=jnp.float32):
        self.dtype = dtype

    def __call__(self, logits: jax.Array, masks: jax.Array) -> jax.Array:
        """Computes the scalar loss of logits and masks, both [B, H, W, classes]."""
        logits, masks = logits.astype(self.dtype), masks.astype(self.dtype)
        p = nnx.sigmoid(logits)
        overlap = jnp.sum(p * masks)
        total = jnp.sum(p * p) + jnp.sum(masks * masks)
        dice = 2 * overlap / total
        return 1 - dice + jnp.mean(optax.sigmoid_binary_cross_entropy(logits, masks))


class Segmenter(nnx.Module):
    """The network and its loss in one module."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.unet = UNet(classes=2, rngs=rngs)
        self.loss = DiceBCE()

    def __call__(self, images: jax.Array, masks: jax.Array) -> jax.Array:
        """Computes the scalar loss of images [B, H, W, 1] and masks [B, H, W, classes]."""
        return self.loss(self.unet(images), masks)


class Batch(NamedTuple):
    """The input of a step.

    Attributes:
      images: [B, 96, 96, 1] float32, digits on noise.
      masks: [B, 96, 96, 2] float32, 1 at pixels of paper (channel 0) and of ink (channel 1).
    """

    images: jax.Array
    masks: jax.Array


def loss_of(model: Segmenter, batch: Batch) -> jax.Array:
    """Computes the loss of a batch, with the signature that `mpjax.diagnose` expects."""
    return model(batch.images, batch.masks)


def make_batch(seed: int) -> Batch:
    """Returns images with four digits each, at five times their size and random positions."""
    random, digits = np.random.default_rng(seed), _digits()
    pages = np.zeros((BATCH, SIZE, SIZE), np.float32)
    for page in pages:
        for digit in digits[random.integers(len(digits), size=4)]:
            height, width = digit.shape
            y, x = random.integers(SIZE - height), random.integers(SIZE - width)
            np.maximum(page[y : y + height, x : x + width], digit, out=page[y : y + height, x : x + width])
    ink = pages > 0.25
    images = pages + 0.5 * random.standard_normal(pages.shape, np.float32)
    return Batch(jnp.asarray(images[..., None]), jnp.asarray(np.stack([~ink, ink], axis=-1), jnp.float32))


@functools.cache
def _digits() -> np.ndarray:
    """Returns the digits as [1797, 40, 40] float32, 0 to 1."""
    return np.kron(load_digits().images.astype(np.float32) / 16, np.ones((5, 5), np.float32))


def create(policy: "str | mpjax.Policy") -> tuple[Segmenter, nnx.Optimizer]:
    """Creates the model, with the same initial values under every policy, and its optimizer."""
    model = Segmenter(rngs=nnx.Rngs(0))
    mpjax.apply_policy(model, policy)
    return model, nnx.Optimizer(model, mpjax.dynamic_loss_scaling(optax.adam(1e-2)), wrt=nnx.Param)


@nnx.jit
def train_step(model: Segmenter, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Takes one step in place; returns the unscaled loss."""

    def scaled(model):
        loss = loss_of(model, batch)
        return mpjax.scale_loss(loss, optimizer.opt_state), loss

    (_, loss), grads = nnx.value_and_grad(scaled, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def dice_of_ink(model: Segmenter, batch: Batch) -> jax.Array:
    """Computes twice the overlap of predicted and true ink, divided by their total size: 1 is perfect."""
    found, ink = model.unet(batch.images)[..., 1] > 0, batch.masks[..., 1] > 0
    return 2 * jnp.sum(found & ink) / (jnp.sum(found) + jnp.sum(ink))


class Run(NamedTuple):
    """The result of a training run.

    Attributes:
      losses: the loss of each step.
      dice: the Dice score of the ink on a batch that was not trained on.
      skipped: number of skipped steps.
      scale: the loss scale at the end.
    """

    losses: list[float]
    dice: float
    skipped: int
    scale: float

    def __str__(self) -> str:
        first, last = self.losses[0], self.losses[-1]
        told = f"loss {first:.3f} -> {last:.3f}  dice {self.dice:.3f}"
        return f"{told}  skipped {self.skipped} of {len(self.losses)}  loss scale {self.scale:g}"


def train(policy: "str | mpjax.Policy", steps: int) -> Run:
    """Trains a new model under a policy."""
    model, optimizer = create(policy)
    losses = [float(train_step(model, optimizer, make_batch(seed))) for seed in range(steps)]
    scaling = mpjax.loss_scale_state(optimizer.opt_state)
    dice = float(dice_of_ink(model, make_batch(steps)))
    return Run(losses, dice, int(scaling.skipped[...]), float(scaling.scale[...]))


def diagnose_first_step(policy: "str | mpjax.Policy") -> mpjax.Diagnosis:
    """Diagnoses the first step under a policy."""
    model, optimizer = create(policy)
    scale = float(mpjax.loss_scale_state(optimizer.opt_state).scale[...])
    return mpjax.diagnose(model, loss_of, make_batch(0), policy=policy, loss_scale=scale)


def main(steps: int = 30) -> tuple[Run, mpjax.Diagnosis, Run, Run]:
    """Trains in float16, diagnoses the failure, trains as proposed and in float32; returns all results."""
    broken = train("mixed_float16", steps)
    print(f"mixed_float16: {broken}\n")

    found = diagnose_first_step("mixed_float16")
    print(f"{found}\n")

    repaired = train(found.repaired_policy, steps)
    print(f"{found.repaired_policy}: {repaired}")
    exact = train("float32", steps)
    print(f"float32: {exact}")
    return broken, found, repaired, exact


if __name__ == "__main__":
    main()
