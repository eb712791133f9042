"""Flax linen: a network with batch norm and a TrainState, in float16 with dynamic loss scaling.

A linen model sets its own dtype, so only the optimizer and the loss change:

- The layers compute in `dtype`; linen keeps parameters and batch statistics in float32.
- `tx` is wrapped in `mpjax.dynamic_loss_scaling`.
- `mpjax.scaled_value_and_grad` computes the gradients.
- A step that overflowed must not count: `apply_gradients` restores the step number and the batch statistics; `tx` has
  already restored parameters and moments.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

import mpjax


POLICY = mpjax.get_policy("mixed_float16")


class ConvNet(nn.Module):
    """Two convolutions with batch norm; a model without a `dtype` could run under `mpjax.autocast` instead."""

    classes: int
    dtype: Any = POLICY.compute_dtype

    @nn.compact
    def __call__(self, images, train: bool):
        """Applies the model: [batch, height, width, channels] -> [batch, classes]."""
        conv = partial(nn.Conv, kernel_size=(3, 3), use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = nn.relu(norm()(conv(8)(images)))
        x = nn.relu(norm()(conv(16, strides=2)(x)))
        x = x.mean((1, 2))
        logits = nn.Dense(self.classes, dtype=self.dtype)(x)
        return logits.astype(POLICY.output_dtype)  # float32, so the loss is float32 too


class TrainState(train_state.TrainState):
    """Flax's state with batch statistics; a step that overflowed changes only the loss scale."""

    batch_stats: Any

    def apply_gradients(self, *, grads, batch_stats):
        """Returns the state after one step."""
        new = super().apply_gradients(grads=grads, batch_stats=batch_stats)
        step, batch_stats = mpjax.where_finite(
            new.opt_state, (new.step, new.batch_stats), (self.step, self.batch_stats)
        )
        return new.replace(step=step, batch_stats=batch_stats)


def create_state(key) -> TrainState:
    """Creates parameters, statistics and the wrapped optimizer; clipping is inside, where gradients are unscaled."""
    model = ConvNet(classes=4)
    variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
    tx = mpjax.dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=tx
    )


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, images, labels) -> tuple[TrainState, jax.Array]:
    """Takes one step; returns the unscaled float32 loss."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, changed["batch_stats"]

    (loss, batch_stats), grads = mpjax.scaled_value_and_grad(loss_fn, has_aux=True)(state.opt_state, state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


@jax.jit
def accuracy(state: TrainState, images, labels) -> jax.Array:
    """Evaluates the same model in the same dtypes, with the running statistics."""
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, images, train=False)
    return jnp.mean(logits.argmax(-1) == labels)


def make_batch(key, size: int = 64):
    """Returns noise images with one bright quadrant; the label is its number."""
    which, noise = jax.random.split(key)
    labels = jax.random.randint(which, (size,), 0, 4)
    quadrants = jax.image.resize(jax.nn.one_hot(labels, 4).reshape(size, 2, 2, 1), (size, 8, 8, 1), "nearest")
    return quadrants + 0.5 * jax.random.normal(noise, (size, 8, 8, 1)), labels


def main(steps: int = 40) -> tuple[float, float]:
    """Trains; returns the first and the last loss."""
    state = create_state(jax.random.key(0))
    losses = []
    for step in range(steps):
        state, loss = train_step(state, *make_batch(jax.random.key(step)))
        losses.append(float(loss))
    scaling = mpjax.loss_scale_state(state.opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", end="  ")
    print(f"accuracy {accuracy(state, *make_batch(jax.random.key(steps))):.2f}", end="  ")
    print(f"steps {state.step}  skipped {scaling.skipped}  scale {scaling.scale:.0f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
