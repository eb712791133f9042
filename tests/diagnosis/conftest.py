"""Small networks of four families, and the real step to hold the emulated one against."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from mpjax.models import MLP, BasicBlock, ResNet, SmallStem
from mpjax.precision import apply_policy


class Block(nnx.Module):
    """A Transformer's: attention and a two-layer network, each behind a norm and around a shortcut."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # jax.nn's attention promotes, and a rule may widen one of two terms
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Tokens [B, T] to logits [B, T, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, depth: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class UNet(nnx.Module):
    """Images [B, H, W, 1] to logits [B, H, W]: one level down, one up, and the shortcut between them."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.down = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.middle = nnx.Conv(width, 2 * width, (3, 3), rngs=rngs)
        self.up = nnx.ConvTranspose(2 * width, width, (2, 2), strides=2, rngs=rngs)
        self.out = nnx.Conv(2 * width, 1, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skip = nnx.relu(self.down(x))
        x = nnx.relu(self.middle(nnx.max_pool(skip, (2, 2), strides=(2, 2))))
        x = jnp.concatenate([self.up(x), skip], axis=-1)
        return self.out(x)[..., 0]


def labels_loss(model, batch):
    """Mean cross-entropy of labels, in float32."""
    logits = model(batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def mask_loss(model, batch):
    """Mean cross-entropy of each pixel, in float32."""
    return optax.sigmoid_binary_cross_entropy(model(batch["x"]).astype(jnp.float32), batch["y"]).mean()


def make(family: str) -> tuple[nnx.Module, object, dict]:
    """A model of a family at initialisation, its loss and a batch."""
    rngs, keys = nnx.Rngs(0), jax.random.split(jax.random.key(1), 2)
    if family == "mlp":
        batch = {"x": jax.random.normal(keys[0], (8, 16)), "y": jnp.array([0, 1, 2, 3, 1, 1, 0, 2])}
        return MLP(16, 32, 3, 4, rngs=rngs), labels_loss, batch
    if family == "resnet":
        batch = {"x": jax.random.normal(keys[0], (8, 8, 8, 3)), "y": jnp.arange(8) % 4}
        model = ResNet((1, 1), BasicBlock, SmallStem, channels=3, width=8, num_classes=4, rngs=rngs)
        return model, labels_loss, batch
    if family == "transformer":
        tokens = jax.random.randint(keys[0], (4, 9), 0, 16)
        return Transformer(16, 16, 2, rngs=rngs), labels_loss, {"x": tokens[:, :-1], "y": tokens[:, 1:]}
    x = jax.random.normal(keys[0], (2, 16, 16, 1))
    return UNet(4, rngs=rngs), mask_loss, {"x": x, "y": (x[..., 0] > 0.5).astype(jnp.float32)}


def real_step(model, loss_fn, batch, policy, scale=1.0, *, one_by_one=False) -> list:
    """Scaled loss and gradients of the step itself, in half-precision arrays; `one_by_one` as of `as_written`."""
    model = nnx.clone(model)
    if policy is not None:
        apply_policy(model, policy)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_of(params):
        return loss_fn(nnx.merge(graph, params, rest, copy=True), batch).astype(jnp.float32) * jnp.float32(scale)

    with jax.numpy_dtype_promotion("standard"):  # jax.nn's attention promotes in its backward pass
        loss, gradients = as_written(jax.value_and_grad(loss_of), one_by_one=one_by_one)(params)
    return [loss, *jax.tree.leaves(gradients)]


def as_written(fn, *, one_by_one=False):
    """A function with every rounding to half precision that it has, of which XLA may leave out some.

    Args:
      fn: the function.
      one_by_one: whether its operations are to run one by one, each a program of its own. Every bit is right only then:
        compiled as a whole, sums of products in float16, or in bfloat16 on jaxlib 0.12, add in another order.
    """
    if not one_by_one:
        return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})

    def eager(*args):
        with jax.disable_jit():
            return fn(*args)

    return eager


@pytest.fixture(scope="session")
def networks():
    """`make(family)`, `real_step`, and the classes and losses."""
    return types.SimpleNamespace(
        make=make,
        real_step=real_step,
        Transformer=Transformer,
        UNet=UNet,
        labels_loss=labels_loss,
        mask_loss=mask_loss,
    )
