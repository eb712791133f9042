"""Equinox: a model with batch norm, whose state is an argument, in float16 with dynamic loss scaling.

An Equinox model has no dtypes to set. `mpjax.autocast` runs it with the matrix products and convolutions in float16 and
with exponentials, logarithms and sums in float32, as torch.amp does:

- `eqx.partition` separates the arrays to differentiate from the rest.
- `mpjax.autocast` wraps the loss function and the evaluation.
- `TX` is wrapped in `mpjax.dynamic_loss_scaling`, and `mpjax.scaled_value_and_grad` computes the gradients.
- `mpjax.where_finite` restores the batch statistics after a step that overflowed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpjax


POLICY = mpjax.get_policy("mixed_float16")


class ConvNet(eqx.Module):
    """Two convolutions with batch norm; the model sets no dtypes."""

    conv1: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d
    norm2: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, classes: int, *, key):
        keys = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, 8, 3, padding=1, use_bias=False, key=keys[0])
        self.norm1 = eqx.nn.BatchNorm(8, "batch", momentum=0.9, mode="batch")
        self.conv2 = eqx.nn.Conv2d(8, 16, 3, stride=2, padding=1, use_bias=False, key=keys[1])
        self.norm2 = eqx.nn.BatchNorm(16, "batch", momentum=0.9, mode="batch")
        self.head = eqx.nn.Linear(16, classes, key=keys[2])

    def __call__(self, image, state):
        """Applies the model: [channels, height, width] -> [classes]."""
        x, state = self.norm1(self.conv1(image), state)
        x, state = self.norm2(self.conv2(jax.nn.relu(x)), state)
        return self.head(jax.nn.relu(x).mean((1, 2))), state


TX = mpjax.dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))


def logits_of(model: ConvNet, state, images):
    """Applies the model to a batch: [batch, channels, height, width] -> [batch, classes], and the new state."""
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(images, state)


def create(key):
    """Creates the model, the state of its batch norms, and the optimizer state."""
    model, state = eqx.nn.make_with_state(ConvNet)(classes=4, key=key)
    return model, state, TX.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def train_step(model: ConvNet, state, opt_state, images, labels):
    """Takes one step; returns the unscaled float32 loss."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, state):
        logits, state = logits_of(eqx.combine(params, static), state, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

    value_and_grad = mpjax.scaled_value_and_grad(mpjax.autocast(loss_fn, POLICY), has_aux=True)
    (loss, new_state), grads = value_and_grad(opt_state, params, state)
    updates, opt_state = TX.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), mpjax.where_finite(opt_state, new_state, state), opt_state, loss


@eqx.filter_jit
def accuracy(model: ConvNet, state, images, labels):
    """Evaluates under the same autocast, with the running statistics."""
    logits, _ = mpjax.autocast(logits_of, POLICY)(eqx.nn.inference_mode(model), state, images)
    return jnp.mean(logits.argmax(-1) == labels)


def make_batch(key, size: int = 64):
    """Returns noise images with one bright quadrant; the label is its number."""
    which, noise = jax.random.split(key)
    labels = jax.random.randint(which, (size,), 0, 4)
    quadrants = jax.image.resize(jax.nn.one_hot(labels, 4).reshape(size, 1, 2, 2), (size, 1, 8, 8), "nearest")
    return quadrants + 0.5 * jax.random.normal(noise, (size, 1, 8, 8)), labels


def main(steps: int = 40) -> tuple[float, float]:
    """Trains; returns the first and the last loss."""
    model, state, opt_state = create(jax.random.key(0))
    losses = []
    for step in range(steps):
        model, state, opt_state, loss = train_step(model, state, opt_state, *make_batch(jax.random.key(step)))
        losses.append(float(loss))
    scaling = mpjax.loss_scale_state(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", end="  ")
    print(f"accuracy {accuracy(model, state, *make_batch(jax.random.key(steps))):.2f}", end="  ")
    print(f"skipped {scaling.skipped}  scale {scaling.scale:.0f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
