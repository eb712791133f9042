"""Functions of Equinox and Haiku under autocast: casts as placed by hand, and training in float32 parameters."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mpjax


F32 = jnp.float32
EACH = pytest.mark.parametrize("half", ["float32", "float16"])
HALF = pytest.mark.parametrize("half", ["float16", "bfloat16"])
IMAGES = jnp.sin(0.37 * jnp.arange(8 * 6 * 6 * 3, dtype=F32)).reshape(8, 6, 6, 3)
TARGETS = jnp.cos(jnp.arange(8 * 2, dtype=F32)).reshape(8, 2)


@pytest.fixture(autouse=True)
def _as_the_libraries_expect():
    """Both add arrays of different ranks, and Haiku raises a float to an integer array."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def assert_same(actual, expected):
    def check(a, b):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, actual, expected)


def op_by_op():
    """A compiled program may keep a bfloat16 product in float32 where its cast back to float32 follows directly, and
    whether it follows directly depends on the order of shaping and casting."""
    return jax.disable_jit()


def dtypes(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


def products_and_others(jaxpr):
    """The dtypes that products, and that exponentials, roots and sums, are given."""
    products, others = set(), set()
    for eqn in jaxpr.eqns:
        for held in jax.tree.leaves(eqn.params, is_leaf=lambda node: hasattr(node, "eqns") or hasattr(node, "jaxpr")):
            inner = getattr(held, "jaxpr", held)
            if hasattr(inner, "eqns"):
                inside = products_and_others(inner)
                products |= inside[0]
                others |= inside[1]
        given = {str(var.aval.dtype) for var in eqn.invars}
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            products |= given
        elif eqn.primitive.name in ("exp", "rsqrt", "sqrt", "reduce_sum", "square", "integer_pow"):
            others |= given
    return products, others


def of_nothing_else(half, jaxpr):
    """Products in half precision alone, and what must be float32 in that alone."""
    assert products_and_others(jaxpr.jaxpr) == ({half}, {"float32"})


def mean_squares(out):
    return jnp.square(out.astype(F32) - TARGETS).mean()


# --- Equinox ---------------------------------------------------------------------------------------------------------


class EquinoxNet(eqx.Module):
    conv: eqx.nn.Conv2d
    batch_norm: eqx.nn.BatchNorm
    layer_norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear
    name: str  # a leaf that is no array

    def __init__(self, key):
        self.conv = eqx.nn.Conv2d(3, 4, 3, padding=1, key=key)
        self.batch_norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.layer_norm = eqx.nn.LayerNorm(4)
        self.linear = eqx.nn.Linear(4, 2, key=key)
        self.name = "net"

    def __call__(self, x, state):
        x, state = self.batch_norm(self.conv(x), state)
        return self.linear(self.layer_norm(jax.nn.relu(x).mean((1, 2)))), state


def equinox_by_hand(half):
    def one(model, x):
        kernel = model.conv.weight.astype(half)
        x = lax.conv_general_dilated(x[None].astype(half), kernel, (1, 1), "SAME")[0].astype(F32) + model.conv.bias
        mean = lax.pmean(x.mean((1, 2)), "batch")[:, None, None]
        variance = jnp.maximum(0.0, lax.pmean(((x - mean) * (x - mean)).mean((1, 2)), "batch"))[:, None, None]
        x = (x - mean) / jnp.sqrt(variance + 1e-5)
        x = x * model.batch_norm.weight[:, None, None] + model.batch_norm.bias[:, None, None]
        x = jax.nn.relu(x).mean((1, 2))
        mean = x.mean(keepdims=True)
        inverse = lax.rsqrt(jnp.maximum(0.0, jnp.var(x, keepdims=True)) + 1e-5)
        x = model.layer_norm.weight * ((x - mean) * inverse) + model.layer_norm.bias
        return (model.linear.weight.astype(half) @ x.astype(half)).astype(F32) + model.linear.bias

    return jax.vmap(one, (None, 0), axis_name="batch")


def batched(model, state, images):
    run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return run(images, state)


CHANNELS_FIRST = IMAGES.transpose(0, 3, 1, 2)


def equinox_net():
    return eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))


@EACH
def test_an_equinox_model_computes_as_with_casts_by_hand(half):
    model, state = equinox_net()
    net = mpjax.autocast(lambda model, images: batched(model, state, images)[0], half)
    by_hand = equinox_by_hand(np.dtype(half))
    with op_by_op():
        assert_same(net(model, CHANNELS_FIRST), by_hand(model, CHANNELS_FIRST))
        grads, expected = (
            eqx.filter_grad(lambda model, f=f: mean_squares(f(model, CHANNELS_FIRST)))(model) for f in (net, by_hand)
        )
    assert_same(grads, expected)
    assert dtypes(grads) == {"float32"}


@HALF
def test_an_equinox_model_has_products_in_half_and_norms_in_float32(half):
    model, state = equinox_net()
    params, static = eqx.partition(model, eqx.is_array)

    def net(params, images):
        return batched(eqx.combine(params, static), state, images)[0]

    of_nothing_else(half, jax.make_jaxpr(mpjax.autocast(net, half))(params, CHANNELS_FIRST))


@pytest.mark.parametrize("half", ["bfloat16"])
def test_an_equinox_model_learns_with_float32_parameters_and_statistics(half):
    model, state = equinox_net()
    tx = mpjax.precision.dynamic_loss_scaling(optax.adam(0.05), initial_scale=2.0**10)
    opt_state = tx.init(eqx.filter(model, eqx.is_array))

    @functools.partial(mpjax.autocast, policy=half)
    def loss_of(params, static, state, images):
        out, state = batched(eqx.combine(params, static), state, images)
        return mean_squares(out), state

    @eqx.filter_jit
    def step(model, state, opt_state):
        params, static = eqx.partition(model, eqx.is_array)
        (loss, state), grads = mpjax.scaled_value_and_grad(loss_of, has_aux=True)(
            opt_state, params, static, state, CHANNELS_FIRST
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    losses = []
    for _ in range(40):
        model, state, opt_state, loss = step(model, state, opt_state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert dtypes(eqx.filter((model, state), eqx.is_array)) == {"float32"}


# --- Haiku -----------------------------------------------------------------------------------------------------------


def haiku_net(images):
    x = hk.Conv2D(4, 3, name="conv")(images)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training=True))
    return hk.Linear(2, name="linear")(x.mean((1, 2)))


def haiku_by_hand(half):
    def net(params, images):
        conv, norm, linear = (params[name] for name in ("conv", "norm", "linear"))
        kernel = conv["w"].astype(half)
        x = lax.conv_general_dilated(
            images.astype(half), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x.astype(F32) + conv["b"]
        mean = x.mean((0, 1, 2), keepdims=True)
        variance = jnp.square(x).mean((0, 1, 2), keepdims=True) - jnp.square(mean)
        x = (x - mean) * (norm["scale"] * lax.rsqrt(variance + 1e-5)) + norm["offset"]
        x = jax.nn.relu(x).mean((1, 2))
        return (x.astype(half) @ linear["w"].astype(half)).astype(F32) + linear["b"]

    return net


def haiku_variables():
    model = hk.transform_with_state(haiku_net)
    return (model.apply, *jax.jit(model.init)(jax.random.key(0), IMAGES))


@EACH
def test_a_haiku_function_computes_as_with_casts_by_hand(half):
    apply, params, state = haiku_variables()
    net = mpjax.autocast(lambda params, images: apply(params, state, None, images)[0], half)
    by_hand = haiku_by_hand(np.dtype(half))
    with op_by_op():
        assert_same(net(params, IMAGES), by_hand(params, IMAGES))
        grads, expected = (
            jax.grad(lambda params, f=f: mean_squares(f(params, IMAGES)))(params) for f in (net, by_hand)
        )
    assert_same(grads, expected)
    assert dtypes(grads) == {"float32"}


@HALF
def test_a_haiku_function_has_products_in_half_and_norms_in_float32(half):
    apply, params, state = haiku_variables()
    net = mpjax.autocast(lambda params, images: apply(params, state, None, images), half)
    of_nothing_else(half, jax.make_jaxpr(net)(params, IMAGES))


@pytest.mark.parametrize("half", ["float16"])
def test_a_haiku_function_learns_with_float32_parameters_and_statistics(half):
    apply, params, state = haiku_variables()
    tx = mpjax.precision.dynamic_loss_scaling(optax.adam(0.05), initial_scale=2.0**10)
    opt_state = tx.init(params)

    def loss_of(params, state):
        out, state = apply(params, state, None, IMAGES)
        return mean_squares(out), state

    @jax.jit
    def step(params, state, opt_state):
        scaled = mpjax.scaled_value_and_grad(mpjax.autocast(loss_of, half), has_aux=True)
        (loss, state), grads = scaled(opt_state, params, state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    losses = []
    for _ in range(40):
        params, state, opt_state, loss = step(params, state, opt_state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert dtypes((params, state)) == {"float32"}


# Sums that only derivatives have

NODES, ROWS = jnp.abs(jnp.sin(jnp.arange(16 * 8, dtype=F32))).reshape(16, 8), jnp.arange(4000) % 3


def gathered(h):
    """The means of 500 rows each: of a longer product, a CPU adds up bfloat16 in bfloat16 (jaxlib 0.12)."""
    return jnp.mean(h[ROWS].reshape(8, 500, -1), axis=1)


def of_haiku(x):
    transformed = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(8)(gathered(hk.Linear(8)(x)))))
    return transformed.init(jax.random.key(0), x), transformed.apply


def of_linen(x):
    class Graph(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(gathered(nn.Dense(8)(x)))

    return Graph().init(jax.random.key(0), x), Graph().apply


def of_equinox(x):
    params, static = eqx.partition([eqx.nn.Linear(8, 8, key=jax.random.key(i)) for i in range(2)], eqx.is_array)

    def apply(params, x):
        first, second = eqx.combine(params, static)
        return jax.vmap(second)(gathered(jax.vmap(first)(x)))

    return params, apply


def of_nnx(x):
    graph, params = nnx.split(nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2)]))

    def apply(params, x):
        first, second = nnx.merge(graph, params)
        return second(gathered(first(x)))

    return params, apply


@pytest.mark.parametrize(
    ("library", "half"),
    [(of_nnx, "float16"), (of_linen, "bfloat16"), (of_equinox, "float16"), (of_haiku, "bfloat16")],
)
def test_a_layer_that_gathers_4000_rows_has_the_gradient_of_float32(library, half):
    params, apply = library(NODES)

    def loss(params, x):
        return jnp.mean(apply(params, x).astype(F32) ** 2)

    wanted = jax.jit(jax.grad(loss))(params, NODES)
    found = jax.jit(jax.grad(mpjax.autocast(loss, f"p=f32,c={half}")))(params, NODES)
    off, size = (
        jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
        for tree in (jax.tree.map(jnp.subtract, found, wanted), wanted)
    )
    assert off / size < 0.01
