"""A gradient penalty under loss scaling: a WGAN-GP critic (Gulrajani et al., 2017) whose loss has a gradient.

Loss scaling protects the outer gradient, with respect to the parameters. The inner gradient, with respect to the
inputs, runs backward through the same float16 layers and can underflow there too. The critic's output is therefore
multiplied by the same scale before the inner gradient is taken, and the gradient is divided by the scale in float32
before the penalty. The scale is a power of two, so neither operation rounds.

The critic separates two clouds of points at a distance d = 3. With slope s everywhere its loss is
10 (s - 1)^2 - d s, which is smallest at s = 1 + d/20: the loss ends near -(d + d^2/40) = -3.225.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import mpjax


DISTANCE = 3.0
"""The distance between the centres of the two clouds."""


def critic(params, x):
    """Applies three layers: [batch, 2] -> [batch]."""
    x = jax.nn.softplus(x @ params["w1"] + params["b1"])
    x = jax.nn.softplus(x @ params["w2"] + params["b2"])
    return (x @ params["w3"])[:, 0]


def input_gradient(score, params, x, scale):
    """Computes the gradient of each score with respect to its own input, in float32: [batch, 2]."""
    scaled = jax.grad(lambda x: jnp.sum(score(params, x).astype(jnp.float32)) * scale)(x)
    return scaled.astype(jnp.float32) / scale


def loss_fn(params, real, fake, where, scale, policy):
    """Computes the Wasserstein loss and the penalty on slopes other than 1 between the clouds; `where` is in [0, 1)."""
    score = mpjax.autocast(critic, policy)
    between = where * real + (1 - where) * fake
    squares = jnp.sum(input_gradient(score, params, between, scale) ** 2, axis=-1)
    penalty = jnp.mean((jnp.sqrt(squares + 1e-12) - 1) ** 2)
    distance = jnp.mean(score(params, real).astype(jnp.float32)) - jnp.mean(score(params, fake).astype(jnp.float32))
    return 10 * penalty - distance


def create_params(key):
    """Creates float32 parameters."""
    keys = jax.random.split(key, 3)
    init = jax.nn.initializers.glorot_normal()
    return {
        "w1": init(keys[0], (2, 64)),
        "b1": jnp.zeros(64),
        "w2": init(keys[1], (64, 64)),
        "b2": jnp.zeros(64),
        "w3": init(keys[2], (64, 1)),
    }


def make_train_step(tx, policy):
    """Returns a compiled step for an optimizer wrapped in one of mpjax's loss scalings."""

    @jax.jit
    def train_step(params, opt_state, real, fake, where):
        scale = mpjax.loss_scale_state(opt_state).scale
        loss, grads = mpjax.scaled_value_and_grad(partial(loss_fn, policy=policy))(
            opt_state, params, real, fake, where, scale
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def make_batch(key, size: int = 128):
    """Returns points of two clouds, and positions in [0, 1) between them at which the penalty takes the slope."""
    real, fake, where = jax.random.split(key, 3)
    shift = jnp.array([DISTANCE, 0.0])
    return (
        0.1 * jax.random.normal(real, (size, 2)) + shift,
        0.1 * jax.random.normal(fake, (size, 2)),
        jax.random.uniform(where, (size, 1)),
    )


def main(steps: int = 200, policy="mixed_float16") -> tuple[float, float]:
    """Trains the critic; returns the first and the last loss, which should be near -3.2."""
    tx = mpjax.dynamic_loss_scaling(optax.adam(3e-3, b1=0.5, b2=0.9))
    params = create_params(jax.random.key(0))
    opt_state = tx.init(params)
    train_step = make_train_step(tx, policy)
    losses = []
    for step in range(steps):
        params, opt_state, loss = train_step(params, opt_state, *make_batch(jax.random.key(step)))
        losses.append(float(loss))
    scaling = mpjax.loss_scale_state(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", end="  ")
    print(f"skipped {scaling.skipped}  scale {scaling.scale:.0f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
