"""A model without a library: a dict of parameters and functions, in float16 with dynamic loss scaling.

- `mpjax.autocast` runs the matrix products of the loss function in float16, and softmax and sums in float32.
- `TX` is wrapped in `mpjax.dynamic_loss_scaling`, and `mpjax.scaled_value_and_grad` computes the gradients.
- `mpjax.where_finite` restores everything else that a step changes: here the step number and the moving average.
- `mpjax.master_weights` lets the same loop store its parameters in half precision: `create_state(key, "float16")`. It
  does nothing to float32 parameters.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mpjax


class State(NamedTuple):
    """Everything that a step changes.

    Attributes:
      params: dict of arrays, in the parameter dtype.
      average: exponential moving average of the parameters, float32.
      opt_state: the optimizer state, including the loss scale and the float32 master weights.
      step: number of applied steps.
    """

    params: dict[str, jax.Array]
    average: dict[str, jax.Array]
    opt_state: Any
    step: jax.Array


TX = mpjax.dynamic_loss_scaling(mpjax.master_weights(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))))


def mlp(params, x):
    """Applies two layers: [batch, features] -> [batch, classes]."""
    hidden = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_fn(params, x, labels) -> jax.Array:
    """Computes the cross entropy of integer labels."""
    return optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), labels).mean()


def create_state(key, param_dtype="float32") -> State:
    """Creates the parameters and everything derived from them."""
    key1, key2 = jax.random.split(key)
    init = jax.nn.initializers.he_normal()
    params = {
        "w1": init(key1, (2, 64), param_dtype),
        "b1": jnp.zeros(64, param_dtype),
        "w2": init(key2, (64, 3), param_dtype),
        "b2": jnp.zeros(3, param_dtype),
    }
    average = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)  # a copy: `train_step` donates its input
    return State(params, average, TX.init(params), jnp.int32(0))


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, x, labels) -> tuple[State, jax.Array]:
    """Takes one step; returns the unscaled float32 loss."""
    value_and_grad = mpjax.scaled_value_and_grad(mpjax.autocast(loss_fn, "mixed_float16"))
    loss, grads = value_and_grad(state.opt_state, state.params, x, labels)
    updates, opt_state = TX.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = optax.incremental_update(params, state.average, 0.1)
    average, step = mpjax.where_finite(opt_state, (average, state.step + 1), (state.average, state.step))
    return State(params, average, opt_state, step), loss


@jax.jit
def accuracy(state: State, x, labels) -> jax.Array:
    """Evaluates the moving average under the same autocast."""
    logits = mpjax.autocast(mlp, "mixed_float16")(state.average, x)
    return jnp.mean(logits.argmax(-1) == labels)


def make_batch(key, size: int = 128):
    """Returns points on three arms of a spiral."""
    arm, place, noise = jax.random.split(key, 3)
    labels = jax.random.randint(arm, (size,), 0, 3)
    radius = jax.random.uniform(place, (size,), minval=0.2)
    angle = 2 * jnp.pi * (labels / 3 + radius / 2) + 0.1 * jax.random.normal(noise, (size,))
    return radius[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1), labels


def main(steps: int = 100, param_dtype: str = "float32") -> tuple[float, float]:
    """Trains; returns the first and the last loss."""
    state = create_state(jax.random.key(0), param_dtype)
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
