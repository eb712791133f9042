"""mixed-precision-for-JAX (`mpx`) on Equinox, as its README and its example have it.

It casts the whole model once, so norms are called in float32 by hand. Batch statistics are no argument of the
differentiated function, or they would be cast too.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import mpx  # pyright: ignore[reportMissingImports]
import optax

from peers import tasks
from peers.tasks import Dtype, TaskName, Weights


PACKAGES = ("mixed-precision-for-JAX", "equinox", "jax")

BATCH_AXIS = "batch"


class Conv(eqx.nn.Conv2d):
    """Equinox's, with given weights [H, W, in, out]."""

    def __init__(self, kernel, *, stride: int = 1, padding: int = 0, bias=None):
        side, _, channels, out = kernel.shape
        key = jax.random.key(0)
        super().__init__(channels, out, side, stride, padding, use_bias=bias is not None, key=key)
        self.weight = jnp.transpose(jnp.asarray(kernel), (3, 2, 0, 1))
        self.bias = None if bias is None else jnp.asarray(bias)[:, None, None]


class Linear(eqx.nn.Linear):
    """Equinox's, with given weights [in, out]."""

    def __init__(self, kernel, bias):
        super().__init__(*kernel.shape, key=jax.random.key(0))
        self.weight, self.bias = jnp.asarray(kernel).T, jnp.asarray(bias)


def batch_norm(channels: int) -> eqx.nn.BatchNorm:
    return eqx.nn.BatchNorm(channels, BATCH_AXIS, eps=tasks.BN_EPSILON, momentum=tasks.MOMENTUM, mode="batch")


def normalised(norm: eqx.nn.BatchNorm, x, state):
    """Batch norm in float32, its output in the dtype of its input."""
    y, state = mpx.cast_to_full_precision(norm)(x.astype(jnp.float32), state)
    return y.astype(x.dtype), state


class ConvAndNorm(eqx.Module):
    """A convolution without bias, and batch norm."""

    conv: Conv
    norm: eqx.nn.BatchNorm

    def __init__(self, weights: Weights, conv: str, stride: int):
        kernel = weights[conv + "/kernel"]
        self.conv = Conv(kernel, stride=stride, padding=kernel.shape[0] // 2)
        self.norm = batch_norm(kernel.shape[-1])

    def __call__(self, x, state):
        return normalised(self.norm, self.conv(x), state)


class Block(eqx.Module):
    """Two 3x3 convolutions around a shortcut."""

    first: ConvAndNorm
    second: ConvAndNorm
    shortcut: ConvAndNorm | None

    def __init__(self, weights: Weights, path: str, stride: int):
        self.first = ConvAndNorm(weights, f"{path}/conv1", stride)
        self.second = ConvAndNorm(weights, f"{path}/conv2", 1)
        given = f"{path}/shortcut/conv"
        self.shortcut = ConvAndNorm(weights, given, stride) if f"{given}/kernel" in weights else None

    def __call__(self, x, state):
        y, state = self.first(x, state)
        y, state = self.second(jax.nn.relu(y), state)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return jax.nn.relu(y + x), state


class ResNet18(eqx.Module):
    """See `tasks.STAGES`; of one image [C, H, W]."""

    stem: ConvAndNorm
    blocks: list[Block]
    head: Linear

    def __init__(self, weights: Weights):
        self.stem = ConvAndNorm(weights, "stem/conv", 1)
        self.blocks = [Block(weights, f"blocks/{number}", stride) for number, *_, stride in tasks.blocks_of_resnet()]
        self.head = Linear(weights["head/kernel"], weights["head/bias"])

    def __call__(self, x, state):
        x, state = self.stem(x, state)
        x = jax.nn.relu(x)
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(jnp.mean(x, axis=(1, 2))), state


class LayerNorm(eqx.nn.LayerNorm):
    """Equinox's, in float32, of positions [T, D]."""

    def __init__(self):
        super().__init__(tasks.WIDTH, eps=tasks.LN_EPSILON)

    def __call__(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return jax.vmap(mpx.force_full_precision(super().__call__, x.dtype))(x)


class Attention(eqx.Module):
    """Written out, as mpx's README asks, so that its softmax is in float32."""

    parts: list[Linear]
    out: Linear

    def __init__(self, weights: Weights, path: str):
        def flat(name: str, *shape: int) -> Linear:
            return Linear(weights[f"{path}/{name}/kernel"].reshape(shape), weights[f"{path}/{name}/bias"].reshape(-1))

        self.parts = [flat(name, tasks.WIDTH, -1) for name in ("query", "key", "value")]
        self.out = flat("out", -1, tasks.WIDTH)

    def __call__(self, x):
        query, key, value = (
            jax.vmap(part)(x).reshape(len(x), tasks.HEADS, -1).transpose(1, 0, 2) for part in self.parts
        )
        scores = query @ key.transpose(0, 2, 1) / jnp.asarray(query.shape[-1], query.dtype) ** 0.5
        shares = mpx.force_full_precision(jax.nn.softmax, scores.dtype)(scores)
        return jax.vmap(self.out)((shares @ value).transpose(1, 0, 2).reshape(len(x), -1))


class TransformerBlock(eqx.Module):
    """Pre-norm attention and a two-layer network."""

    norms: list[LayerNorm]
    attention: Attention
    up: Linear
    down: Linear

    def __init__(self, weights: Weights, path: str):
        self.norms = [LayerNorm(), LayerNorm()]
        self.attention = Attention(weights, f"{path}/attention")
        self.up = Linear(weights[f"{path}/mlp/up/kernel"], weights[f"{path}/mlp/up/bias"])
        self.down = Linear(weights[f"{path}/mlp/down/kernel"], weights[f"{path}/mlp/down/bias"])

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        y = jax.nn.gelu(jax.vmap(self.up)(self.norms[1](x)), approximate=False)
        return x + jax.vmap(self.down)(y)


class ViT(eqx.Module):
    """See `tasks.PATCH`; of one image [C, H, W]."""

    patches: Conv
    positions: jax.Array
    blocks: list[TransformerBlock]
    norm: LayerNorm
    head: Linear

    def __init__(self, weights: Weights):
        self.patches = Conv(weights["patches/kernel"], stride=tasks.PATCH, bias=weights["patches/bias"])
        self.positions = jnp.asarray(weights["positions"])
        self.blocks = [TransformerBlock(weights, f"blocks/{number}") for number in range(tasks.DEPTH)]
        self.norm = LayerNorm()
        self.head = Linear(weights["head/kernel"], weights["head/bias"])

    def __call__(self, x, state):
        x = self.patches(x)
        x = x.reshape(tasks.WIDTH, -1).T + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(mpx.force_full_precision(jnp.mean, x.dtype)(self.norm(x), axis=0)), state


def start(task: TaskName, dtype: Dtype) -> Callable[[int], dict]:
    halves = dtype != "float32"
    model, statistics = eqx.nn.make_with_state({"resnet18": ResNet18, "vit": ViT}[task])(tasks.weights_of(task))
    tx = optax.sgd(**tasks.SGD, nesterov=True) if task == "resnet18" else optax.adam(**tasks.ADAM)
    opt_state = tx.init(eqx.filter(model, eqx.is_array))
    # It has no bfloat16 without scaling; with a scale of 1 and no growth it costs the same as none.
    first = 2.0**15 if dtype == "float16" else 1.0
    scaling = mpx.DynamicLossScaling(jnp.float32(first), min_loss_scaling=jnp.float32(1), period=2000)

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, model, statistics, opt_state, scaling):
        if halves:
            mpx.set_half_precision_datatype(getattr(jnp, dtype))

        def loss_fn(model, images):
            forward = jax.vmap(model, axis_name=BATCH_AXIS, in_axes=(0, None), out_axes=(0, None))
            logits, new = forward(jnp.transpose(images, (0, 3, 1, 2)), statistics)
            logits = logits.astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (new, jnp.mean(jnp.argmax(logits, -1) == batch["label"]))

        grad_fn = mpx.filter_value_and_grad(loss_fn, scaling, has_aux=True, use_mixed_precision=halves)
        images = batch["image"].astype(jnp.float32) / 255
        (loss, (new, accuracy)), scaling, finite, grads = grad_fn(model, images)
        model, opt_state = mpx.optimizer_update(model, tx, opt_state, grads, finite)
        metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": optax.global_norm(grads)}
        return model, new, opt_state, scaling, metrics

    batches = jax.device_put(tasks.batches())

    def step(index: int) -> dict:
        nonlocal model, statistics, opt_state, scaling
        model, statistics, opt_state, scaling, metrics = train_step(
            batches[index % len(batches)], model, statistics, opt_state, scaling
        )
        return metrics

    return step
