"""Flax NNX: any model and `nnx.Optimizer`, in float16 with dynamic loss scaling.

- `mpjax.apply_policy` sets the dtypes of every layer, norms in float32, and returns a table of the result.
- `tx` is wrapped in `mpjax.dynamic_loss_scaling`.
- The loss to differentiate is `mpjax.scale_loss(loss, optimizer.opt_state)`.
- The model updates its batch statistics in the forward pass, and `nnx.Optimizer` counts every step.
  `mpjax.where_finite` restores both after a step that overflowed.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax


class ConvNet(nnx.Module):
    """Two convolutions with batch norm; the model sets no dtypes."""

    def __init__(self, classes: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(16, classes, rngs=rngs)

    def __call__(self, images, train: bool):
        """Applies the model: [batch, height, width, channels] -> [batch, classes]."""
        x = nnx.relu(self.norm1(self.conv1(images), use_running_average=not train))
        x = nnx.relu(self.norm2(self.conv2(x), use_running_average=not train))
        return self.head(x.mean((1, 2)))


def create(seed: int) -> tuple[ConvNet, nnx.Optimizer]:
    """Creates the model with its policy and the wrapped optimizer; clipping is inside, where gradients are unscaled."""
    model = ConvNet(classes=4, rngs=nnx.Rngs(seed))
    mpjax.apply_policy(model, "mixed_float16")  # print it to see every layer's dtypes
    tx = mpjax.dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def train_step(model: ConvNet, optimizer: nnx.Optimizer, images, labels) -> jax.Array:
    """Takes one step in place; returns the unscaled float32 loss."""
    old_statistics, old_step = nnx.as_pure(nnx.state(model, nnx.BatchStat)), optimizer.step[...]

    def loss_fn(model):
        loss = optax.softmax_cross_entropy_with_integer_labels(model(images, train=True), labels).mean()
        return mpjax.scale_loss(loss, optimizer.opt_state), loss

    (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)

    new_statistics = nnx.as_pure(nnx.state(model, nnx.BatchStat))
    nnx.update(model, mpjax.where_finite(optimizer.opt_state, new_statistics, old_statistics))
    optimizer.step[...] = mpjax.where_finite(optimizer.opt_state, optimizer.step[...], old_step)
    return loss


@nnx.jit
def accuracy(model: ConvNet, images, labels) -> jax.Array:
    """Evaluates the same model in the same dtypes, with the running statistics."""
    return jnp.mean(model(images, train=False).argmax(-1) == labels)


def make_batch(key, size: int = 64):
    """Returns noise images with one bright quadrant; the label is its number."""
    which, noise = jax.random.split(key)
    labels = jax.random.randint(which, (size,), 0, 4)
    quadrants = jax.image.resize(jax.nn.one_hot(labels, 4).reshape(size, 2, 2, 1), (size, 8, 8, 1), "nearest")
    return quadrants + 0.5 * jax.random.normal(noise, (size, 8, 8, 1)), labels


def main(steps: int = 40) -> tuple[float, float]:
    """Trains; returns the first and the last loss."""
    model, optimizer = create(seed=0)
    losses = []
    for step in range(steps):
        losses.append(float(train_step(model, optimizer, *make_batch(jax.random.key(step)))))
    scaling = mpjax.loss_scale_state(optimizer.opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", end="  ")
    print(f"accuracy {accuracy(model, *make_batch(jax.random.key(steps))):.2f}", end="  ")
    print(f"steps {optimizer.step[...]}  skipped {scaling.skipped[...]}  scale {scaling.scale[...]:.0f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
