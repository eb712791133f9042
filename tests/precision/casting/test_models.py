"""Whole models under autocast: values and gradients bit for bit those of casts placed by hand.

Each model is there twice: as Flax modules, and as a function of jnp and lax that writes out every cast. With casts to
float32 that function computes what the modules compute, bit for bit, so that it is known to be the same model.

Both are compiled, so that the two programs must also be the same to the compiler.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpjax
from mpjax.models import Bottleneck, ImageNetStem, ResNet, identity, max_pool, normalize, relu


F32 = jnp.float32
# Each half dtype for one kind of model; with the other one no other line runs.
OF_LINEN, OF_NNX = "float16", "bfloat16"


@pytest.fixture(autouse=True)
def _ranks():
    """Flax adds a bias of one rank to images of another; the dtypes stay strict, so that no cast is left out here."""
    with jax.numpy_rank_promotion("allow"):
        yield


# --- Casts by hand ---------------------------------------------------------------------------------------------------
#
# `half` is the dtype of products, cast at each use. What goes on in float32 is cast once.


def conv(x, kernel, half, stride=1, padding="SAME"):
    return lax.conv_general_dilated(
        x.astype(half), kernel.astype(half), (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def with_bias(product, bias):
    return product.astype(F32) + bias


def dense(x, params, half):
    return with_bias(jnp.tensordot(x.astype(half), params["kernel"].astype(half), 1), params["bias"])


def moments(x, axes):
    squares = lax.square(x)  # before the mean: gradients add up in the order of uses
    mean = jnp.mean(x, axes)
    return mean, jnp.maximum(0.0, jnp.mean(squares, axes) - lax.square(mean))


def normalized(x, mean, variance, params, epsilon):
    return (x - mean) * (lax.rsqrt(variance + epsilon) * params["scale"]) + params["bias"]


def batch_norm(x, params, epsilon=1e-5):
    x = x.astype(F32)
    return normalized(x, *moments(x, (0, 1, 2)), params, epsilon)


def layer_norm(x, params):
    x = x.astype(F32)
    mean, variance = moments(x, (-1,))
    return normalized(x, mean[..., None], variance[..., None], params, 1e-6)


def group_norm(x, params, groups):
    channels = x.shape[-1]
    mean, variance = moments(x.reshape(*x.shape[:-1], groups, channels // groups).astype(F32), (1, 2, 4))
    mean, variance = (jnp.repeat(m, channels // groups, axis=-1)[:, None, None] for m in (mean, variance))
    return normalized(x.astype(F32), mean, variance, params, 1e-6)


def gelu(x):
    x = x.astype(F32)
    cubes = x**3
    share = 0.5 * (1.0 + jnp.tanh(np.sqrt(2 / np.pi).astype(F32) * (x + 0.044715 * cubes)))
    return x * share


# --- The comparison --------------------------------------------------------------------------------------------------


def assert_same(actual, expected):
    def check(a, b):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, actual, expected)


def outputs_and_gradients(net, params, *args):
    """Of a loss with unlike gradients for each output."""

    def loss(params):
        out = net(params, *args)
        weights = jnp.cos(jnp.arange(out.size, dtype=F32)).reshape(out.shape)
        return (jnp.square(out.astype(F32)) * weights).sum(), out

    return jax.grad(loss, has_aux=True)(params)


def assert_as_by_hand(net, by_hand, params, *args, half):
    """`net(params, *args)` beside `by_hand(params, *args, half=...)`."""

    def run(net):
        # Else a bfloat16 may stay float32 between two casts, depending on what shaping stands between them.
        options = {"xla_allow_excess_precision": False}
        return jax.jit(functools.partial(outputs_and_gradients, net), compiler_options=options)(params, *args)

    if half == "float32":
        assert_same(run(net), run(functools.partial(by_hand, half=F32)))
        return
    actual = run(mpjax.autocast(net, half))
    assert_same(actual, run(functools.partial(by_hand, half=jnp.dtype(half))))
    grads, out = actual
    assert all(grad.dtype == F32 and np.isfinite(grad).all() for grad in jax.tree.leaves(grads))
    assert np.isfinite(out).all()
    assert np.std(out) > 0.01


def of_linen(model, *args):
    shapes = dict(jax.eval_shape(model.init, jax.random.key(0), *args))
    params = drawn(shapes.pop("params"))
    stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return lambda params, *args: model.apply({"params": params, **stats}, *args, mutable=[*stats])[0], params


def of_nnx(make):
    graph, shapes, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
    structure = jax.tree.structure(shapes)

    def net(params, *args):
        return nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(params)), stats, copy=True)(*args)

    return net, drawn(nnx.to_pure_dict(shapes))


def drawn(shapes):
    """Kernels that keep the size of what they multiply; scales and biases that are not ones and zeros."""
    rng = np.random.default_rng(0)

    def draw(path, shape):
        values = rng.standard_normal(shape.shape, np.float32)
        if shape.ndim > 1:
            return jnp.asarray(values * np.float32(np.prod(shape.shape[:-1]) ** -0.5))
        return jnp.asarray(np.float32(0.1) * values + np.float32(path[-1].key == "scale"))

    return jax.tree.map_with_path(draw, shapes)


def numbered(params, name, index):
    """Submodule `index` of a list, as NNX and linen keep it."""
    return params[name][index] if name in params else params[f"{name}_{index}"]


IMAGES = jnp.sin(0.37 * jnp.arange(4 * 16 * 16 * 3, dtype=F32)).reshape(4, 16, 16, 3)


# --- A residual network of bottlenecks -------------------------------------------------------------------------------


class LinenBottleneck(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, epsilon=1e-5)
        y = nn.relu(norm(name="norm1")(conv(self.width, (1, 1), name="conv1")(x)))
        y = nn.relu(norm(name="norm2")(conv(self.width, (3, 3), self.stride, 1, name="conv2")(y)))
        y = norm(name="norm3")(conv(4 * self.width, (1, 1), name="conv3")(y))
        if x.shape != y.shape:
            x = norm(name="shortcut_norm")(conv(4 * self.width, (1, 1), self.stride, name="shortcut_conv")(x))
        return nn.relu(y + x)


class LinenResNet(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (7, 7), 2, padding=3, use_bias=False, name="stem_conv")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, epsilon=1e-5, name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for index, (stage, first) in enumerate(BLOCKS):
            x = LinenBottleneck(self.width * 2**stage, 2 if stage and first else 1, name=f"blocks_{index}")(x)
        return nn.Dense(10, name="head")(jnp.mean(x, (1, 2)))


STAGES = (2, 1)
"""Every kind of block that ResNet-50 has: with a shortcut, without, and with one of stride 2."""

BLOCKS = [(stage, index == 0) for stage, depth in enumerate(STAGES) for index in range(depth)]


def plain_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


def pool_with_own_derivative(x):
    return max_pool(x, 3, 2, ((1, 1), (1, 1)))


def norm_with_own_derivative(x, params):
    scale, bias = (params[name].reshape(1, 1, 1, -1) for name in ("scale", "bias"))
    return normalize((1e-5, None, False), x.astype(F32), scale, bias)[0]


def resnet_by_hand(params, x, half, pool=plain_pool, norm=batch_norm, relu=jax.nn.relu):
    def conv_norm(x, part, number="", activation=relu, **options):
        kernel, weights = named(part, f"conv{number}"), named(part, f"norm{number}")
        return activation(norm(conv(x, kernel["kernel"], half, **options), weights))

    def named(part, name):
        """`stem/conv` in mpjax's model, `stem_conv` in the one above, `conv1` in a block of both."""
        where, key = part
        return where[key][name] if key in where else where[f"{key}_{name}"] if key else where[name]

    x = pool(conv_norm(x, (params, "stem"), stride=2, padding=((3, 3), (3, 3))))
    for index, (stage, first) in enumerate(BLOCKS):
        block, stride = numbered(params, "blocks", index), 2 if stage and first else 1
        y = conv_norm(x, (block, ""), 1)
        y = conv_norm(y, (block, ""), 2, stride=stride, padding=((1, 1), (1, 1)))
        y = conv_norm(y, (block, ""), 3, activation=identity)
        x = relu(y + (conv_norm(x, (block, "shortcut"), activation=identity, stride=stride) if first else x))
    return dense(jnp.mean(x, (1, 2)), params["head"], half)


@pytest.mark.slow
def test_a_residual_network_of_linen():
    net, params = of_linen(LinenResNet(), IMAGES)
    assert sum(leaf.ndim == 4 for leaf in jax.tree.leaves(params)) == 1 + 4 + 3 + 4
    assert_as_by_hand(net, resnet_by_hand, params, IMAGES, half=OF_LINEN)


@pytest.mark.slow
def test_a_residual_network_of_nnx():
    make = functools.partial(ResNet, STAGES, Bottleneck, ImageNetStem, channels=3, width=8, num_classes=10)
    net, params = of_nnx(lambda: make(rngs=nnx.Rngs(0)))
    assert sum(leaf.ndim == 4 for leaf in jax.tree.leaves(params)) == 1 + 4 + 3 + 4
    by_hand = functools.partial(resnet_by_hand, pool=pool_with_own_derivative, norm=norm_with_own_derivative, relu=relu)
    assert_as_by_hand(net, by_hand, params, IMAGES, half=OF_NNX)


@pytest.mark.slow
def test_batch_norms_of_many_rows_round_the_gradient_of_their_input_once(monkeypatch):
    monkeypatch.setattr("mpjax.models.batch_norm.MANY", 8)
    test_a_residual_network_of_nnx()


# --- A Transformer encoder -------------------------------------------------------------------------------------------


TOKENS = jnp.array([[1, 5, 2, 7, 3, 0], [4, 4, 6, 0, 0, 0]])
VISIBLE = (TOKENS > 0)[:, None, None, :]
"""Padding is for no token to see."""


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(2, name="attention")
        x = x + attention(nn.LayerNorm(name="norm1")(x), mask=mask)
        y = nn.gelu(nn.Dense(32, use_bias=False, name="widen")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(16, name="narrow")(y)


class LinenEncoder(nn.Module):
    @nn.compact
    def __call__(self, tokens, mask):
        x = nn.Embed(8, 16, name="embed")(tokens)
        for index in range(2):
            x = EncoderLayer(name=f"layers_{index}")(x, mask)
        return nn.Dense(3, name="head")(nn.LayerNorm(name="norm")(x).mean(1))


class NnxEncoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.widen = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.narrow = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.narrow(nnx.gelu(self.widen(self.norm2(x))))


class NnxEncoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 16, rngs=rngs)
        self.layers = nnx.List([NnxEncoderLayer(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, tokens, mask):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x).mean(1))


def attention_of_linen(query, key, value, mask, half):
    query = query / np.sqrt(np.float32(8))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query.astype(half), key.astype(half))
    # No half dtype holds the least float32.
    weights = jax.nn.softmax(jnp.where(mask, logits.astype(F32), np.finfo(np.float32).min))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(half), value.astype(half))


def attention_of_nnx(query, key, value, mask, half):
    """As `jax.nn.dot_product_attention`: it scales the logits, and its mask is one that bfloat16 can hold."""
    large = np.float32(-0.7) * np.finfo(np.float32).max

    def of_group(query):
        logits = jnp.einsum("bqhd,bkhd->bhqk", query.astype(half), key.astype(half))
        logits = logits * jnp.asarray(1 / np.sqrt(8), half)
        if half == jnp.bfloat16:
            weights = jax.nn.softmax(jnp.where(mask, logits, jnp.asarray(large, half)).astype(F32))
        else:
            weights = jax.nn.softmax(jnp.where(mask, logits.astype(F32), large))
        return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(half), value.astype(half))

    # Queries come in groups that share a key, here in groups of one.
    return jax.vmap(of_group, 3, 3)(query[:, :, :, None])[:, :, :, 0]


def layer_by_hand(attend, layer, x, mask, half, narrow=dense):
    def projected(x, part):
        return with_bias(jnp.tensordot(x.astype(half), part["kernel"].astype(half), 1), part["bias"])

    def attention(x, part):
        query, key, value = (projected(x, part[name]) for name in ("query", "key", "value"))
        seen = attend(query, key, value, mask, half)
        return with_bias(jnp.tensordot(seen, part["out"]["kernel"].astype(half), 2), part["out"]["bias"])

    x = x + attention(layer_norm(x, layer["norm1"]), layer["attention"])
    y = layer_norm(x, layer["norm2"]).astype(half) @ layer["widen"]["kernel"].astype(half)
    return x + narrow(gelu(y), layer["narrow"], half)


def encoder_by_hand(attend, params, tokens, mask, half):
    x = jnp.take(params["embed"]["embedding"], tokens, axis=0)
    for index in range(2):
        x = layer_by_hand(attend, numbered(params, "layers", index), x, mask, half)
    return dense(layer_norm(x, params["norm"]).mean(1), params["head"], half)


@pytest.mark.slow
def test_a_transformer_encoder_of_linen():
    net, params = of_linen(LinenEncoder(), TOKENS, VISIBLE)
    by_hand = functools.partial(encoder_by_hand, attention_of_linen)
    assert_as_by_hand(net, by_hand, params, TOKENS, VISIBLE, half=OF_LINEN)


def test_a_transformer_encoder_of_nnx():
    net, params = of_nnx(lambda: NnxEncoder(nnx.Rngs(0)))
    by_hand = functools.partial(encoder_by_hand, attention_of_nnx)
    assert_as_by_hand(net, by_hand, params, TOKENS, VISIBLE, half=OF_NNX)


# --- Encoder layers in a scan, rematerialised, with a derivative of their own ----------------------------------------


def with_rule(cast, uncast):
    """A product whose gradient for the kernel is halved, by a rule of its own."""

    @jax.custom_vjp
    def product(x, kernel):
        return cast(x) @ cast(kernel)

    def backward(kept, g):
        x, kernel = kept
        flat, rows = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        return uncast(cast(g) @ cast(kernel).T), uncast(cast(flat).T @ cast(rows)) * 0.5

    product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), backward)
    return product


class DenseWithRule(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (32, 16))
        bias = self.param("bias", nn.initializers.zeros, (16,))
        return with_rule(lambda a: a, lambda a: a)(x, kernel) + bias


class EncoderLayerWithRule(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(2, name="attention")
        x = x + attention(nn.LayerNorm(name="norm1")(x), mask=mask)
        y = nn.gelu(nn.Dense(32, use_bias=False, name="widen")(nn.LayerNorm(name="norm2")(x)))
        return x + DenseWithRule(name="narrow")(y)


def scanned(layer, policy):
    """Layers with stacked parameters one after the other, each computed anew for its gradient."""

    def net(params, x, *args):
        step = jax.checkpoint(lambda x, params: (layer(params, x, *args), None), policy=policy)
        return lax.scan(step, x, params)[0]

    return net


@pytest.mark.slow
@pytest.mark.parametrize(("half", "saved"), [("float16", None), ("bfloat16", "dots_saveable")])
def test_encoder_layers_in_a_scan_rematerialised_with_a_derivative_rule(half, saved):
    policy = saved and getattr(jax.checkpoint_policies, saved)
    x = jnp.cos(jnp.arange(2 * 6 * 16, dtype=F32)).reshape(2, 6, 16)
    layer, params = of_linen(EncoderLayerWithRule(), x, VISIBLE)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 0.5 * leaf]), params)

    def by_hand(params, x, mask, half):
        rule = with_rule(lambda a: a.astype(half), lambda a: a.astype(F32))
        narrow = lambda y, part, half: with_bias(rule(y, part["kernel"]), part["bias"])  # noqa: E731
        one = lambda params, x, mask: layer_by_hand(attention_of_linen, params, x, mask, half, narrow)  # noqa: E731
        return scanned(one, policy)(params, x, mask)

    assert_as_by_hand(scanned(layer, policy), by_hand, stacked, x, VISIBLE, half=half)


# --- A U-Net ---------------------------------------------------------------------------------------------------------


class LinenUNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        fine = nn.silu(nn.GroupNorm(4, name="norm1")(nn.Conv(8, (3, 3), name="conv1")(x)))
        coarse = nn.Conv(16, (3, 3), 2, use_bias=False, name="down1")(fine)
        coarser = nn.silu(nn.GroupNorm(4, name="norm2")(nn.Conv(16, (3, 3), 2, name="down2")(coarse)))
        y = nn.ConvTranspose(16, (2, 2), (2, 2), use_bias=False, name="up2")(coarser)
        y = nn.Conv(16, (3, 3), use_bias=False, name="conv2")(jnp.concatenate([y, coarse], -1))
        y = nn.silu(nn.GroupNorm(4, name="norm3")(y))
        y = nn.ConvTranspose(8, (3, 3), (2, 2), use_bias=False, name="up1")(y)
        y = nn.silu(nn.GroupNorm(4, name="norm4")(nn.Conv(8, (3, 3), name="conv3")(jnp.concatenate([y, fine], -1))))
        return nn.Conv(2, (1, 1), name="head")(y)


class NnxUNet(nnx.Module):
    def __init__(self, rngs):
        conv, up = functools.partial(nnx.Conv, rngs=rngs), functools.partial(nnx.ConvTranspose, rngs=rngs)
        self.conv1 = conv(3, 8, (3, 3))
        self.down1 = conv(8, 16, (3, 3), strides=2, use_bias=False)
        self.down2 = conv(16, 16, (3, 3), strides=2)
        self.up2 = up(16, 16, (2, 2), strides=(2, 2), use_bias=False)
        self.conv2 = conv(32, 16, (3, 3), use_bias=False)
        self.up1 = up(16, 8, (3, 3), strides=(2, 2), use_bias=False)
        self.conv3 = conv(16, 8, (3, 3))
        self.head = conv(8, 2, (1, 1))
        for index, channels in enumerate((8, 16, 16, 8), 1):
            setattr(self, f"norm{index}", nnx.GroupNorm(channels, 4, rngs=rngs))

    def __call__(self, x):
        fine = nnx.silu(self.norm1(self.conv1(x)))
        coarse = self.down1(fine)
        coarser = nnx.silu(self.norm2(self.down2(coarse)))
        y = nnx.silu(self.norm3(self.conv2(jnp.concatenate([self.up2(coarser), coarse], -1))))
        y = nnx.silu(self.norm4(self.conv3(jnp.concatenate([self.up1(y), fine], -1))))
        return self.head(y)


def unet_by_hand(params, x, half):
    def conv_bias(x, name, stride=1):
        return with_bias(conv(x, params[name]["kernel"], half, stride), params[name]["bias"])

    def normed(x, name):
        return jax.nn.silu(group_norm(x, params[name], 4))

    def up(x, name):
        return lax.conv_transpose(x.astype(half), params[name]["kernel"].astype(half), (2, 2), "SAME")

    fine = normed(conv_bias(x, "conv1"), "norm1")
    coarse = conv(fine, params["down1"]["kernel"], half, 2)
    coarser = normed(conv_bias(coarse, "down2", 2), "norm2")
    joined = jnp.concatenate([up(coarser, "up2"), coarse], -1)  # both half
    y = normed(conv(joined, params["conv2"]["kernel"], half), "norm3")
    joined = jnp.concatenate([up(y, "up1").astype(F32), fine], -1)  # half and float32
    return conv_bias(normed(conv_bias(joined, "conv3"), "norm4"), "head")


@pytest.mark.slow
def test_a_unet_of_linen():
    net, params = of_linen(LinenUNet(), IMAGES[:2])
    assert_as_by_hand(net, unet_by_hand, params, IMAGES[:2], half=OF_LINEN)


@pytest.mark.slow
def test_a_unet_of_nnx():
    net, params = of_nnx(lambda: NnxUNet(nnx.Rngs(0)))
    assert_as_by_hand(net, unet_by_hand, params, IMAGES[:2], half=OF_NNX)
