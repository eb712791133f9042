"""Attention with scores and softmax in float32: right in half precision, on a CPU too, and in Flax's own layer."""

import functools
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.precision import apply_policy, dot_product_attention, flax_attention
from mpjax.precision.casting import equations


F32 = jnp.dtype("float32")
HALF = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])


def inputs(dtype=jnp.float32, *, heads=4, shape=(2, 5)):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (4, heads, heads)
    return [jax.random.normal(k, (*shape, n, 8)).astype(dtype) for k, n in zip(keys, sizes, strict=True)]


def rows(fn, *args, operation):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name == operation]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "masked", "is_causal"), [(4, False, False), (4, False, True), (2, True, False), (1, True, True)]
)
def test_in_float32_it_is_jaxs(heads, masked, is_causal):
    qkv = inputs(heads=heads)
    mask = jnp.ones((2, 1, 5, 5), bool).at[0, 0, :, 3].set(False) if masked else None
    bias = jax.random.normal(jax.random.key(1), (2, 4, 5, 5))
    with jax.numpy_rank_promotion("allow"):
        expected = jax.nn.dot_product_attention(*qkv, bias, mask, is_causal=is_causal)
    actual = dot_product_attention(*qkv, bias=bias, mask=mask, is_causal=is_causal)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@HALF
def test_in_half_it_rounds_weights_and_output_only(dtype):
    qkv = inputs(dtype)
    wide = dot_product_attention(*(x.astype(jnp.float32) for x in qkv))
    actual = jax.jit(dot_product_attention)(*qkv)
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual.astype(jnp.float32), wide, atol=3 * jnp.finfo(dtype).eps)


def test_scores_may_be_larger_than_float16_can_hold():
    query, key = jnp.full((1, 1, 1, 64), 100, jnp.float16), jnp.full((1, 2, 1, 64), 100, jnp.float16)
    key = key.at[0, 1].set(99)  # scores of 80000 and 79200
    value = jnp.array([1, -1], jnp.float16).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 1, 64), jnp.float16)
    out = jax.jit(dot_product_attention)(query, key, value)
    assert np.array_equal(out, np.ones((1, 1, 1, 64)))


@HALF
def test_a_query_that_may_attend_to_nothing_gets_the_mean_and_finite_gradients(dtype):
    qkv = inputs(dtype)
    mask = jnp.zeros((2, 1, 5, 5), bool)

    def loss(query, key, value):
        out = dot_product_attention(query, key, value, mask=mask)
        return jnp.sum(out.astype(jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    mean = jnp.broadcast_to(jnp.mean(qkv[2].astype(jnp.float32), axis=1, keepdims=True), out.shape)
    np.testing.assert_allclose(out.astype(jnp.float32), mean, atol=2 * jnp.finfo(dtype).eps)
    assert all(np.isfinite(gradient.astype(jnp.float32)).all() for gradient in gradients)
    assert not gradients[0].any()


@HALF
def test_products_forward_and_backward_are_of_half_precision_operands_and_the_softmax_is_float32(dtype):
    def loss(query, key, value):
        return jnp.sum(dot_product_attention(query, key, value).astype(jnp.float32))

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    products = rows(gradient, *inputs(dtype), operation="dot_general")
    assert len(products) == 6
    assert {var.aval.dtype for eqn in products for var in eqn.invars} == {jnp.dtype(dtype)}
    assert {eqn.outvars[0].aval.dtype for eqn in rows(gradient, *inputs(dtype), operation="exp")} == {F32}


@HALF
def test_gradients_in_half_are_those_of_float32_rounded(dtype):
    def loss(query, key, value):
        out = dot_product_attention(query, key, value, is_causal=True).astype(jnp.float32)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    qkv = inputs(dtype)
    half = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*qkv)
    wide = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(x.astype(jnp.float32) for x in qkv))
    for a, b in zip(half, wide, strict=True):
        np.testing.assert_allclose(
            a.astype(jnp.float32), b, atol=4 * float(jnp.finfo(dtype).eps) * float(jnp.abs(b).max())
        )


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_transformations_change_nothing(transform):
    qkv = inputs(jnp.float16, shape=(3, 2, 5))
    expected = dot_product_attention(*qkv).astype(jnp.float32)
    np.testing.assert_allclose(transform(dot_product_attention)(*qkv).astype(jnp.float32), expected, atol=0.002)


def test_forward_mode_gives_the_slope_that_reverse_mode_gives():
    qkv = inputs()
    out, pull = jax.vjp(dot_product_attention, *qkv)
    _, slope = jax.jvp(dot_product_attention, qkv, qkv)
    along = sum(jnp.vdot(a, b) for a, b in zip(pull(out), qkv, strict=True))
    assert float(jnp.vdot(slope, out)) == pytest.approx(float(along), rel=1e-5)


# In Flax's layer


def layer(policy, **options):
    model = nnx.MultiHeadAttention(4, 16, num_kv_heads=2, decode=False, rngs=nnx.Rngs(params=0, dropout=1), **options)
    apply_policy(model, policy)
    return model


X = jnp.linspace(-1, 1, 160, dtype=jnp.float32).reshape(2, 5, 16)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_flax_attention_compiles_for_a_cpu_and_has_its_softmax_in_float32(policy, dropout):
    model = layer(policy, dropout_rate=dropout, deterministic=False)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        return jnp.mean(jnp.square(nnx.merge(graph, params, rest, copy=True)(X, is_causal=True)))

    gradient = jax.jit(jax.grad(loss))(params)
    assert all(np.isfinite(leaf).all() and leaf.any() for leaf in jax.tree.leaves(gradient))
    assert {eqn.outvars[0].aval.dtype for eqn in rows(jax.grad(loss), params, operation="exp")} == {F32}


def test_flax_attention_in_half_is_near_that_in_float32():
    wide, half = (
        nnx.jit(lambda model: model(X, is_causal=True))(layer(policy)) for policy in ("float32", "mixed_float16")
    )
    np.testing.assert_allclose(half, wide, atol=2e-3)


def test_dropout_zeroes_weights_keeps_their_mean_and_is_the_same_on_all_heads_unless_asked():
    qkv = inputs(jnp.float16, shape=(2, 64))
    value = jnp.ones_like(qkv[2])
    drop = functools.partial(flax_attention, *qkv[:2], value, dropout_rng=jax.random.key(0), dropout_rate=0.25)
    assert float(jnp.mean(drop().astype(jnp.float32))) == pytest.approx(1, abs=0.02)
    assert float(jnp.std(drop(broadcast_dropout=False).astype(jnp.float32))) > 0.01
    assert np.array_equal(drop(deterministic=True), np.ones(value.shape))

    even = functools.partial(flax_attention, jnp.zeros_like(qkv[0]), qkv[1], value, dropout_rate=0.25)
    same = even(dropout_rng=jax.random.key(0))
    assert np.array_equal(same[:, :, :1].repeat(4, axis=2), same)
    other = even(dropout_rng=jax.random.key(0), broadcast_dropout=False)
    assert not np.array_equal(other[:, :, :1].repeat(4, axis=2), other)


def test_weights_can_be_sown():
    model = layer("mixed_float16")
    _, sown = nnx.capture(model, nnx.Intermediate)(X, sow_weights=True)
    (weights,) = jax.tree.leaves(sown)
    assert (weights.shape, weights.dtype) == ((2, 4, 5, 5), jnp.float16)


@pytest.mark.skipif("nnx_sow_capture_noop" not in flax.config._values, reason="flax before 0.12.11 always sows")
@pytest.mark.parametrize("only_in_capture", [False, True])
def test_outside_a_capture_weights_are_sown_where_and_as_flax_sows_them(only_in_capture):
    """Flax warns there, has an option that makes `sow` do nothing there, and is going to make it the only way."""
    found = {}
    for policy in ("float32", "mixed_float16"):
        model = layer(policy)
        flax.config.update("nnx_sow_capture_noop", only_in_capture)
        try:
            with warnings.catch_warnings(record=True, action="always") as told:
                model(X, sow_weights=True)
        finally:
            flax.config.update("nnx_sow_capture_noop", False)
        found[policy] = jax.tree.structure(nnx.state(model, nnx.Intermediate)), [w.category for w in told]
    assert found["float32"] == found["mixed_float16"]
    assert found["float32"][0].num_leaves == (0 if only_in_capture else 1)


def test_an_attention_of_the_users_choice_is_left_alone():
    def chosen(query, key, value, **_):
        return query + jnp.repeat(value, 2, axis=-2)

    assert layer("mixed_float16", attention_fn=chosen).attention_fn is chosen


def test_a_later_policy_without_half_precision_gives_flax_its_own_back():
    model = layer("mixed_float16")
    assert model.attention_fn is flax_attention
    apply_policy(model, "float32")
    assert model.attention_fn is nnx.dot_product_attention


def test_a_rule_that_keeps_the_layer_in_float32_keeps_flax_attention():
    assert layer("mixed_float16;type:MultiHeadAttention=float32").attention_fn is nnx.dot_product_attention


GROUPED = pytest.mark.parametrize("heads", [1, 2])


@HALF
@GROUPED
def test_gradients_of_shared_keys_are_sums_inside_products(dtype, heads):
    """Copies of a key for each of its queries would have gradients that are added in half precision."""

    def loss(query, key, value):
        return jnp.sum(dot_product_attention(query, key, value).astype(jnp.float32))

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    qkv = inputs(dtype, heads=heads)
    assert len(rows(gradient, *qkv, operation="dot_general")) == 6
    sums = [eqn for operation in ("reduce_sum", "add_any") for eqn in rows(gradient, *qkv, operation=operation)]
    assert {eqn.outvars[0].aval.dtype for eqn in sums} <= {F32}


@GROUPED
def test_shared_keys_are_those_of_the_neighbouring_heads(heads):
    query, key, value = inputs(heads=heads)

    def loss(attention, query, key, value):
        out = attention(query, key, value)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)), out

    def of_copies(query, key, value):
        return dot_product_attention(query, *(jnp.repeat(x, 4 // heads, axis=-2) for x in (key, value)))

    run = functools.partial(jax.jit, static_argnums=0)(jax.grad(loss, argnums=(1, 2, 3), has_aux=True))
    actual, expected = run(dot_product_attention, query, key, value), run(of_copies, query, key, value)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_scale_and_cap_change_the_scores_before_the_mask():
    query, key, value = inputs()
    scores = 3.0 * jnp.einsum("btnh,bsnh->bnts", query, key)
    mask = jnp.tril(jnp.ones((5, 5), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(mask, 2.0 * jnp.tanh(scores / 2.0), -jnp.inf), axis=-1)
    actual = dot_product_attention(query, key, value, is_causal=True, scale=3.0, cap=2.0)
    np.testing.assert_allclose(actual, jnp.einsum("bnts,bsnh->btnh", weights, value), atol=1e-5)
