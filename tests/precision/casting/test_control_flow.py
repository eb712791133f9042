"""Casts inside control flow are those placed by hand in its bodies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax


F32 = jnp.float32
HALF = pytest.mark.parametrize("half", ["float16", "bfloat16"])
X = jnp.linspace(-1.0, 1.0, 24, dtype=F32).reshape(4, 6)
W = jnp.linspace(-0.5, 0.5, 36, dtype=F32).reshape(6, 6)


def layer(x, w, dot):
    return jnp.exp(jnp.tanh(dot(x, w)).astype(F32))


def plain(x, w):
    return x @ w


def by_hand(half):
    return lambda x, w: x.astype(half) @ w.astype(half)


def scanned(x, w, dot):
    return lax.scan(lambda carry, s: (layer(carry, w, dot), dot(carry, w) * s), x, jnp.arange(3, dtype=x.dtype))


def scanned_backwards(x, w, dot):
    return lax.scan(lambda carry, w: (layer(carry, w, dot), None), x, jnp.stack([w, -w, w]), reverse=True, unroll=2)[0]


def looped(x, w, dot):
    return lax.fori_loop(0, 3, lambda i, carry: layer(carry, w, dot), x)


def while_looped(x, w, dot):
    return lax.while_loop(
        lambda carry: (layer(carry[1], w, dot).sum() > 0) & (carry[0] < 3),
        lambda carry: (carry[0] + 1, layer(carry[1], w, dot)),
        (0, x),
    )


def switched(x, w, dot):
    return lax.switch(jnp.argmax(x[-1]) % 3, [lambda x: layer(x, w, dot), jnp.exp, lambda x: x], x)


def conditional(x, w, dot):
    return lax.cond(x[-1, -1] > 0, lambda: layer(x, w, dot), lambda: x)


def rematerialized(x, w, dot):
    return jax.checkpoint(lambda x: layer(layer(x, w, dot), w, dot))(x)


def jitted(x, w, dot):
    return jax.jit(lambda x, w: layer(x, w, dot))(x, w)


def mapped(x, w, dot):
    return jax.vmap(lambda x: layer(x, w, dot))(x)


def nested(x, w, dot):
    def body(carry, _):
        inner = jax.checkpoint(lambda x: lax.cond(x[0, 0] > 0, lambda: layer(x, w, dot), lambda: x))
        return jax.jit(jax.vmap(lambda x: inner(x[None])[0]))(carry), None

    return lax.scan(body, x, None, length=2)[0]


FLOWS = [
    scanned,
    scanned_backwards,
    looped,
    while_looped,
    switched,
    conditional,
    rematerialized,
    jitted,
    mapped,
    nested,
]


def assert_same(actual, expected):
    def check(a, b):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, actual, expected)


def hand_placed(flow, half):
    """The scanned output of a product meets float32 there, as under autocast."""
    dot = by_hand(half)
    if flow is scanned:
        return lambda x, w: lax.scan(
            lambda carry, s: (layer(carry, w, dot), dot(carry, w).astype(F32) * s), x, jnp.arange(3, dtype=F32)
        )
    return lambda x, w: flow(x, w, dot)


@pytest.mark.parametrize(("flow", "half"), list(zip(FLOWS, itertools.cycle(("float16", "bfloat16")), strict=False)))
def test_values_are_those_of_hand_placed_casts(flow, half):
    cast = mpjax.autocast(lambda x, w: flow(x, w, plain), half)
    assert_same(jax.jit(cast)(X, W), jax.jit(hand_placed(flow, half))(X, W))


@pytest.mark.parametrize("flow", [flow for flow in FLOWS if flow is not while_looped])
def test_gradients_are_those_of_hand_placed_casts(flow):
    def total(fn):
        return lambda x, w: sum(leaf.sum() for leaf in jax.tree.leaves(fn(x, w)))

    cast = jax.grad(total(mpjax.autocast(lambda x, w: flow(x, w, plain), "bfloat16")), argnums=(0, 1))
    expected = jax.grad(total(hand_placed(flow, "bfloat16")), argnums=(0, 1))
    assert_same(jax.jit(cast)(X, W), jax.jit(expected)(X, W))


@pytest.mark.parametrize("flow", [scanned_backwards, switched, rematerialized])
def test_a_gradient_inside_is_near_the_gradient_in_float32(flow):
    def grad(x, w):
        return jax.grad(lambda w: flow(x, w, plain).sum())(w)

    cast, expected = jax.jit(mpjax.autocast(grad, "float16"))(X, W), jax.jit(grad)(X, W)
    np.testing.assert_allclose(cast.astype(F32), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("flow", [scanned, conditional, jitted])
def test_vmap_and_jvp_outside(flow):
    batch = jnp.stack([X, -X])
    cast, hand = mpjax.autocast(lambda x, w: flow(x, w, plain), "float16"), hand_placed(flow, "float16")
    assert_same(jax.jit(jax.vmap(cast, (0, None)))(batch, W), jax.jit(jax.vmap(hand, (0, None)))(batch, W))
    tangent = jnp.ones_like(X)
    pushed, expected = (jax.jit(lambda x, t, f=f: jax.jvp(lambda x: f(x, W), (x,), (t,))) for f in (cast, hand))
    assert_same(pushed(X, tangent), expected(X, tangent))


def test_branches_meet_in_the_widest_of_their_dtypes():
    def fn(x, w, first):
        return lax.cond(first, lambda: x @ w, lambda: x)

    assert mpjax.autocast(fn, "float16")(X, W, True).dtype == F32
    out = mpjax.autocast(lambda x, w: lax.cond(x[0, 0] < 0, lambda: x @ w, lambda: w[:4] @ w), "float16")(X, W)
    assert_same(out, by_hand("float16")(X, W))


def test_a_carry_keeps_its_dtype():
    carry, ys = mpjax.autocast(lambda x, w: lax.scan(lambda c, _: (c @ w, c @ w), x, None, length=2), "float16")(X, W)
    assert carry.dtype == F32
    assert ys.dtype == jnp.float16
    once = by_hand("float16")(X, W)
    assert_same(carry, by_hand("float16")(once.astype(F32), W).astype(F32))


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x, s: lax.cond(x[0, 0] < 0, f, lambda x, s: f(x, 1.0), x, s),
        lambda f: lambda x, s: lax.scan(lambda c, x: (c, f(x, s)), 0, x[None])[1],
    ],
    ids=["jit", "checkpoint", "cond", "scan"],
)
def test_a_python_scalar_handed_inside_does_not_widen(wrap):
    fn = mpjax.autocast(wrap(lambda x, s: (x @ W) * s), "float16")
    assert fn(X, 2.0).dtype == jnp.float16
    assert jax.jit(lambda x: fn(x, 2.0))(X).dtype == jnp.float16
    # Passed in from outside it may be any number.
    assert jax.jit(fn)(X, 2.0).dtype == F32


@pytest.mark.parametrize("where", ["in_shardings", "out_shardings"])
def test_an_inner_jit_keeps_the_shardings_it_was_given(where):
    divided = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P("data"))
    inner = jax.jit(lambda x: x @ x.T, **{where: divided})
    assert mpjax.autocast(inner, "float16")(X).sharding.is_equivalent_to(divided, 2)


def test_a_number_that_comes_out_of_an_inner_jit_does_not_widen():
    root = jax.jit(jnp.sqrt)
    assert mpjax.autocast(lambda x: (x @ W) / root(64.0), "float16")(X).dtype == jnp.float16


def test_shard_map_over_two_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def local(dot):
        def body(x, w):
            y = dot(x, w)
            return y, lax.psum(jnp.exp(y.astype(F32)).sum(), "data")

        return jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P()))

    cast, hand = mpjax.autocast(local(plain), "float16"), local(by_hand("float16"))
    assert_same(jax.jit(cast)(X, W), jax.jit(hand)(X, W))
    # The sum over devices of a gradient in half comes before or after its cast to float32.
    grads = [jax.jit(jax.grad(lambda w, f=f: f(X, w)[1]))(W) for f in (cast, hand)]
    np.testing.assert_allclose(*grads, rtol=0.01, atol=1e-3)
    outside = jax.shard_map(
        mpjax.autocast(lambda x, w: lax.psum(plain(x, w), "data"), "float16"),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
    )
    dot = by_hand("float16")
    assert_same(jax.jit(outside)(X, W), dot(X[:2], W).astype(F32) + dot(X[2:], W).astype(F32))


def test_means_over_devices_are_summed_in_float32():
    """In float16, 2 times 60000 would be inf before it is divided by 2."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    mean = jax.shard_map(
        lambda x, w: lax.pmean(plain(x, w), "data"), mesh=mesh, in_specs=(P("data"), P()), out_specs=P()
    )
    found = jax.jit(mpjax.autocast(mean, "float16"))(jnp.ones((2, 1)), jnp.full((1, 3), 6e4))
    assert_same(found, jnp.full((1, 3), 6e4, F32))
