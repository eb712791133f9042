"""Flax linen, its TrainState and its DynamicScale, put together as in Flax's own ImageNet example."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from flax.traverse_util import unflatten_dict

from peers import tasks
from peers.tasks import Dtype, TaskName
from peers.training.stepping import stepping


PACKAGES = ("flax", "jax")


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    width: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x, train: bool):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(batch_norm, train, self.dtype)
        y = conv(self.width, (3, 3), strides=self.stride, padding=1, name="conv1")(x)
        y = nn.relu(norm(name="norm1")(y))
        y = norm(name="norm2")(conv(self.width, (3, 3), padding=1, name="conv2")(y))
        if x.shape != y.shape:
            x = conv(self.width, (1, 1), strides=self.stride, name="shortcut_conv")(x)
            x = norm(name="shortcut_norm")(x)
        return nn.relu(y + x)


class ResNet18(nn.Module):
    """See `tasks.STAGES`."""

    dtype: Any

    @nn.compact
    def __call__(self, x, train: bool = True):
        stem = nn.Conv(tasks.RESNET_WIDTH, (3, 3), padding=1, use_bias=False, dtype=self.dtype, name="stem_conv")
        x = nn.relu(batch_norm(train, self.dtype, name="stem_norm")(stem(x)))
        for number, _, out, stride in tasks.blocks_of_resnet():
            x = Block(out, stride, self.dtype, name=f"blocks_{number}")(x, train)
        return nn.Dense(tasks.CLASSES, dtype=self.dtype, name="head")(jnp.mean(x, axis=(1, 2)))


class TransformerBlock(nn.Module):
    """Pre-norm attention and a two-layer network."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.LayerNorm, epsilon=tasks.LN_EPSILON, dtype=self.dtype)
        attention = nn.MultiHeadDotProductAttention(tasks.HEADS, dtype=self.dtype, name="attention")
        x = x + attention(norm(name="norm1")(x))
        y = nn.Dense(4 * tasks.WIDTH, dtype=self.dtype, name="mlp_up")(norm(name="norm2")(x))
        return x + nn.Dense(tasks.WIDTH, dtype=self.dtype, name="mlp_down")(nn.gelu(y, approximate=False))


class ViT(nn.Module):
    """See `tasks.PATCH`."""

    dtype: Any

    @nn.compact
    def __call__(self, x, train: bool = True):
        side = (tasks.PATCH, tasks.PATCH)
        x = nn.Conv(tasks.WIDTH, side, strides=side, padding="VALID", dtype=self.dtype, name="patches")(x)
        x = x.reshape(x.shape[0], -1, tasks.WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)
        for number in range(tasks.DEPTH):
            x = TransformerBlock(self.dtype, name=f"blocks_{number}")(x)
        x = nn.LayerNorm(epsilon=tasks.LN_EPSILON, dtype=self.dtype, name="norm")(x)
        return nn.Dense(tasks.CLASSES, dtype=self.dtype, name="head")(jnp.mean(x, axis=1))


def batch_norm(train: bool, dtype, *, name: str) -> nn.BatchNorm:
    return nn.BatchNorm(
        use_running_average=not train, momentum=tasks.MOMENTUM, epsilon=tasks.BN_EPSILON, dtype=dtype, name=name
    )


class State(TrainState):
    """Flax's, with batch statistics and the loss scale."""

    batch_stats: Any
    dynamic_scale: DynamicScale | None


def apply_gradients(state: State, grads, batch_stats, dynamic_scale: DynamicScale | None, finite) -> State:
    """As the example does: on overflow the parameters and the optimizer's state are taken back."""
    new = state.apply_gradients(grads=grads, batch_stats=batch_stats, dynamic_scale=dynamic_scale)
    if dynamic_scale is None:
        return new
    pick = functools.partial(jnp.where, finite)
    return new.replace(
        params=jax.tree.map(pick, new.params, state.params),
        opt_state=jax.tree.map(pick, new.opt_state, state.opt_state),
    )


def start(task: TaskName, dtype: Dtype) -> Callable[[int], dict]:
    model = {"resnet18": ResNet18, "vit": ViT}[task](dtype=jnp.dtype(dtype))
    params = unflatten_dict({_path(name): jnp.asarray(w) for name, w in tasks.weights_of(task).items()})
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, tasks.SIDE, tasks.SIDE, tasks.CHANNELS)))
    assert jax.tree.structure(shapes["params"]) == jax.tree.structure(params)
    stats = {
        name: {key: jnp.ones(s.shape) if key == "var" else jnp.zeros(s.shape) for key, s in leaves.items()}
        for name, leaves in _flat(shapes.get("batch_stats", {})).items()
    }
    # Scalar arrays: the defaults, Python numbers, would make the step compile twice.
    counts: dict[str, Any] = {"scale": jnp.float32(2.0**15), "fin_steps": jnp.int32(0)}
    state = State.create(
        apply_fn=model.apply,
        params=params,
        tx=optimizer(task),
        batch_stats=unflatten_dict(stats),
        dynamic_scale=DynamicScale(**counts) if dtype == "float16" else None,
    )
    state = state.replace(step=jnp.int32(0))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: State, batch):
        def loss_fn(params):
            images = (batch["image"].astype(jnp.float32) / 255).astype(model.dtype)
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, images, mutable=["batch_stats"])
            logits = logits.astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (new.get("batch_stats", {}), logits)

        if state.dynamic_scale is None:
            dynamic_scale, finite = None, None
            (loss, (stats, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        else:
            grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
            dynamic_scale, finite, (loss, (stats, logits)), grads = grad_fn(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": optax.global_norm(grads)}
        return apply_gradients(state, grads, stats, dynamic_scale, finite), metrics

    return stepping(train_step, state)


def optimizer(task: TaskName) -> optax.GradientTransformation:
    return optax.sgd(**tasks.SGD, nesterov=True) if task == "resnet18" else optax.adam(**tasks.ADAM)


def _path(name: str) -> tuple[str, ...]:
    """`blocks/0/mlp/up/kernel` as the modules above name it: `blocks_0/mlp_up/kernel`."""
    for part in ("blocks", "mlp", "shortcut", "stem"):
        name = name.replace(f"{part}/", f"{part}_")
    return tuple(name.split("/"))


def _flat(tree, path=()) -> dict:
    """Paths to the innermost mappings of a tree."""
    if not any(hasattr(value, "items") for value in tree.values()):
        return {path: tree} if tree else {}
    return {p: leaves for key, value in tree.items() for p, leaves in _flat(value, (*path, key)).items()}
