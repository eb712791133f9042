"""Casts per operation, bit for bit as placed by hand, and what autocast leaves alone."""

import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mpjax
from mpjax.errors import UsageError
from mpjax.models import BasicBlock, ResNet, SmallStem
from mpjax.precision.casting import control_flow, source_lines, source_of


F32 = jnp.float32
HALF = pytest.mark.parametrize("half", ["float16", "bfloat16"])
X = jnp.linspace(0.1, 2.0, 24, dtype=F32).reshape(4, 6)
W = jnp.linspace(-1.0, 1.0, 30, dtype=F32).reshape(6, 5)
IMAGE = jnp.sin(jnp.arange(2 * 6 * 6 * 4, dtype=F32)).reshape(2, 6, 6, 4)


def kernel(*shape):
    return jnp.cos(jnp.arange(np.prod(shape), dtype=F32)).reshape(shape)


def conv(image, kernel, stride=1, groups=1):
    return lax.conv_general_dilated(
        image, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def assert_same(actual, expected):
    leaves, structure = jax.tree.flatten(actual)
    wanted, wanted_structure = jax.tree.flatten(expected)
    assert structure == wanted_structure
    for a, b in zip(leaves, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


PRODUCTS = {
    "matmul": (lambda x, w: x @ w, X, W),
    "einsum": (lambda x, w: jnp.einsum("bi,io->ob", x, w), X, W),
    "vdot": (jnp.vdot, X[0], W[:, 0]),
    "batched": (jnp.matmul, jnp.stack([X, -X]), jnp.stack([W, W])),
    "conv": (conv, IMAGE, kernel(3, 3, 4, 8)),
    "strided": (lambda x, w: conv(x, w, stride=2), IMAGE, kernel(3, 3, 4, 8)),
    "grouped": (lambda x, w: conv(x, w, groups=2), IMAGE, kernel(3, 3, 2, 8)),
    "depthwise": (lambda x, w: conv(x, w, groups=4), IMAGE, kernel(3, 3, 1, 4)),
    "transposed": (lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), IMAGE, kernel(3, 3, 4, 8)),
}


@HALF
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_run_in_half(name, half):
    fn, x, w = PRODUCTS[name]
    actual = jax.jit(mpjax.autocast(fn, half))(x, w)
    assert actual.dtype == half
    assert_same(actual, jax.jit(lambda x, w: fn(x.astype(half), w.astype(half)))(x, w))


FULL = {
    "exp": jnp.exp,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "pow": lambda x: x**2.5,
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "rsqrt": lax.rsqrt,
    "sum": jnp.sum,
    "mean": jnp.mean,
    "prod": jnp.prod,
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": jax.nn.logsumexp,
    "standardize": jax.nn.standardize,
    "softplus": jax.nn.softplus,
    "mse": lambda x: optax.squared_error(x).mean(),
    "cross_entropy": lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.array([0, 1, 2, 3])),
}


COMPOSED = ("softmax", "log_softmax", "logsumexp", "standardize", "softplus", "mse", "cross_entropy")


@HALF
@pytest.mark.parametrize("name", [name for name in FULL if name not in COMPOSED])
def test_what_loses_range_or_precision_widens_the_result_of_a_product_to_float32(name, half):
    actual = mpjax.autocast(lambda x, w: FULL[name](jnp.abs(x @ w)), half)(X, W)
    assert_same(actual, FULL[name](jnp.abs(X.astype(half) @ W.astype(half)).astype(F32)))


@HALF
@pytest.mark.parametrize("name", FULL)
def test_what_loses_range_or_precision_leaves_float32_as_it_is(name, half):
    assert_same(jax.jit(mpjax.autocast(FULL[name], half))(X), jax.jit(FULL[name])(X))


@HALF
def test_a_difference_of_what_was_only_moved_stays_in_half(half):
    def difference(x, w):
        product = x @ w
        return product.T.reshape(product.shape) - jnp.where(product > 0, product, jnp.zeros_like(product))

    assert mpjax.autocast(difference, half)(X, W).dtype == half


@HALF
def test_softmax_of_half_logits_is_float32(half):
    logits = (X.astype(half) @ W.astype(half)).astype(F32)
    for function in (jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp):
        assert_same(mpjax.autocast(lambda x, w, f=function: f(x @ w), half)(X, W), function(logits))


@HALF
def test_the_largest_of_half_values_is_half(half):
    assert mpjax.autocast(lambda x, w: jnp.max(x @ w), half)(X, W).dtype == half


@HALF
def test_gradients_of_several_uses_in_float32_add_up_in_float32(half):
    def uses(product):
        return jnp.sum(jnp.exp(product) + jnp.square(product) + product**3)

    with jax.disable_jit():
        actual = jax.grad(mpjax.autocast(lambda w: uses(X @ w), half))(W)
        expected = jax.grad(lambda w: uses((X.astype(half) @ w.astype(half)).astype(F32)))(W)
    assert_same(actual, expected)


WIDEST = {
    "add": lambda a, b: a + b,
    "concatenate": lambda a, b: jnp.concatenate([a, b]),
    "select": lambda a, b: jnp.where(jnp.arange(5) > 2, a, b),
    "scatter": lambda a, b: a.at[1:3].set(b[:2]),
    "scatter_add": lambda a, b: a.at[jnp.array([1, 1])].add(b[:2]),
    "scatter_subtract": lambda a, b: a.at[jnp.array([1, 2])].subtract(b[:2]),
    "dynamic_update": lambda a, b: lax.dynamic_update_slice(a, b[:1], (0, 0)),
    "maximum": jnp.maximum,
    "pad": lambda a, b: lax.pad(a, b[0, 0], [(1, 1, 0), (0, 0, 0)]),
}


@HALF
@pytest.mark.parametrize("name", WIDEST)
def test_half_and_float32_meet_in_float32(name, half):
    other = jnp.full((4, 5), 0.3, F32)
    product = X.astype(half) @ W.astype(half)
    actual = mpjax.autocast(lambda x, w, b: WIDEST[name](x @ w, b), half)(X, W, other)
    assert_same(actual, WIDEST[name](product.astype(F32), other))
    both = mpjax.autocast(lambda x, w: WIDEST[name](x @ w, x @ w), half)(X, W)
    assert_same(both, WIDEST[name](product, product))


@HALF
def test_python_scalars_do_not_widen(half):
    product = X.astype(half) @ W.astype(half)
    plain = mpjax.autocast(lambda x, w, s, n: jnp.where(x @ w > 0, x @ w * 2.0 + s, 0.0) / n, half)
    expected = jnp.where(product > 0, product * 2.0 + 3.0, 0.0) / jnp.asarray(4, half)
    assert_same(plain(X, W, 3.0, 4), expected)
    assert_same(jax.jit(lambda x, w: plain(x, w, 3.0, 4))(X, W), expected)


def test_a_scalar_that_half_cannot_hold_widens_instead_of_becoming_infinite_or_zero():
    masked = mpjax.autocast(lambda x, w, m: jnp.where(m, x @ w, m_value), "float16")
    for m_value in (-1e9, float(jnp.finfo(F32).min)):
        out = masked(X, W, jnp.zeros((4, 5), bool))
        assert out.dtype == F32
        assert np.array_equal(out, np.full((4, 5), m_value, np.float32))
    assert mpjax.autocast(lambda x, w: 0.0 * (x @ w) + 1e-8, "float16")(X, W)[0, 0] == np.float32(1e-8)
    assert mpjax.autocast(lambda x, w: x @ w - jnp.inf, "float16")(X, W).dtype == jnp.float16
    assert mpjax.autocast(lambda x, w: x @ w - 1e9, "bfloat16")(X, W).dtype == jnp.bfloat16


def test_a_fully_masked_attention_row_has_finite_output_and_gradients():
    def attend(q, k):
        weights = jax.nn.softmax(jnp.where(jnp.zeros((4, 4), bool), q @ k.T, -1e9))
        return weights @ k

    out = mpjax.autocast(attend, "float16")(X, X)
    assert_same(out, jnp.full((4, 4), 0.25, jnp.float16) @ X.astype(jnp.float16))
    grad = jax.grad(lambda q: mpjax.autocast(attend, "float16")(q, X).astype(F32).sum())(X)
    assert np.isfinite(grad).all()


def test_a_sum_of_large_losses_and_bce_on_logits_stay_finite_and_right():
    loss = mpjax.autocast(lambda x, w: ((x @ w) ** 2).sum(), "float16")
    assert loss(jnp.ones((4096, 20)), jnp.ones((20, 1))) == 4096 * 400.0
    logits = jnp.linspace(-50.0, 50.0, 101, dtype=F32)[:, None]
    bce = mpjax.autocast(
        lambda x: optax.sigmoid_binary_cross_entropy(x @ jnp.ones((1, 1)), jnp.ones((101, 1))), "float16"
    )
    np.testing.assert_allclose(bce(logits), optax.sigmoid_binary_cross_entropy(logits, jnp.ones((101, 1))), rtol=1e-3)


def test_integers_bools_keys_and_complex_numbers_are_untouched():
    ones = jnp.ones((3, 3), jnp.int32)
    cast = mpjax.autocast(lambda i, b, k, z: (i @ i + 3, ~b, jax.random.split(k, 2), z @ z), "float16")
    i, b, k, z = cast(ones, jnp.array([True]), jax.random.key(3), jnp.ones((2, 2), jnp.complex64))
    assert_same((i, b, z), (ones * 6, jnp.array([False]), jnp.full((2, 2), 2, jnp.complex64)))
    assert_same(jax.random.key_data(k), jax.random.key_data(jax.random.split(jax.random.key(3), 2)))
    int8 = jnp.full((2, 2), 100, jnp.int8)
    wide = mpjax.autocast(lambda a: lax.dot(a, a, preferred_element_type=jnp.int32), "float16")(int8)
    assert_same(wide, jnp.full((2, 2), 20000, jnp.int32))


def test_float64_is_untouched():
    code = (
        "import jax, jax.numpy as jnp, mpjax\n"
        "x = jnp.full((2, 2), 1 + 1e-12); w = jnp.ones((2, 2), jnp.float32)\n"
        "cast = mpjax.autocast(lambda x, w: (x @ x, jnp.exp(x), x + (w @ w).astype(x.dtype), w @ w), 'float16')\n"
        "a, b, c, d = cast(x, w)\n"
        "assert (a == x @ x).all() and (b == jnp.exp(x)).all() and (c == x + 2).all(), (a, b, c)\n"
        "assert [str(v.dtype) for v in (a, b, c, d)] == ['float64'] * 3 + ['float16'], (a, b, c, d)\n"
    )
    env = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_an_explicit_dtype_wins():
    def fn(x, w):
        return (
            lax.dot(x, w, preferred_element_type=jnp.bfloat16),
            jnp.exp(x).astype(jnp.bfloat16),
            x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
            lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32),
        )

    pet, cast, product, algorithm = mpjax.autocast(fn, "float16")(X, W)
    half = X.astype(jnp.float16), W.astype(jnp.float16)
    assert_same(pet, lax.dot(*half, preferred_element_type=jnp.bfloat16))
    assert_same(cast, jnp.exp(X).astype(jnp.bfloat16))
    assert product.dtype == jnp.float16
    assert_same(algorithm, lax.dot(X, W, precision=lax.DotAlgorithmPreset.F32_F32_F32))


@pytest.mark.parametrize("policy", ["float32", "float64"])
def test_a_full_policy_returns_the_function_itself(policy):
    fn = jnp.sin
    assert mpjax.autocast(fn, policy) is fn


def test_pytrees_keyword_arguments_and_other_leaves_pass():
    def fn(params, *, x, activation, name, flag=None):
        assert name.dtype.kind == "U"
        assert isinstance(params["scale"], float)
        return {"y": getattr(jnp, activation)(x @ params["w"]) * params["scale"], "none": flag, "n": (1, params["n"])}

    params = {"w": W, "scale": 2.0, "n": np.arange(3, dtype=np.int32)}
    out = mpjax.autocast(fn, "bfloat16")(params, x=X, activation="tanh", name=np.array(["a"]))
    expected = jnp.tanh(X.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)) * 2.0
    assert_same((out["y"], out["n"][1]), (expected, jnp.arange(3, dtype=jnp.int32)))
    assert out["none"] is None
    assert mpjax.autocast(fn, "bfloat16").__name__ == "fn"


@HALF
def test_closures_over_arrays_and_tracers(half):
    def outer(x, w):
        return mpjax.autocast(lambda x: (x @ w) @ jnp.ones((5, 2), F32), half)(x)

    expected = (X.astype(half) @ W.astype(half)) @ jnp.ones((5, 2), half)
    assert_same(outer(X, W), expected)
    assert_same(jax.jit(outer)(X, W), jax.jit(lambda: expected)())
    assert jax.grad(lambda w: outer(X, w).astype(F32).sum())(W).dtype == F32


@HALF
def test_gradients_arrive_in_the_dtype_of_the_parameters_and_as_by_hand(half):
    def loss(w, x):
        return jnp.square(jnp.tanh(x @ w)).sum()

    def by_hand(w, x):
        return jnp.square(jnp.tanh(x.astype(half) @ w.astype(half)).astype(F32)).sum()

    assert_same(jax.grad(mpjax.autocast(loss, half))(W, X), jax.grad(by_hand)(W, X))
    assert jax.grad(mpjax.autocast(loss, half))(W, X).dtype == F32
    inside = mpjax.autocast(jax.grad(loss), half)(W, X)
    assert inside.dtype == half  # the last operation of the derivative is a product
    np.testing.assert_allclose(inside.astype(F32), jax.grad(loss)(W, X), rtol=0.1, atol=0.02)


@HALF
def test_jvp_and_a_gradient_penalty_are_as_by_hand(half):
    def net(w, x):
        return jnp.tanh(x @ w).sum()

    def net_by_hand(w, x):
        return jnp.tanh(x.astype(half) @ w.astype(half)).astype(F32).sum()

    def penalty(net):
        return lambda w, x: jnp.square(jax.grad(net, argnums=1)(w, x)).sum()

    cast = mpjax.autocast(net, half)
    pushed = jax.jvp(cast, (W, X), (W, X)), jax.jvp(net_by_hand, (W, X), (W, X))
    assert_same(pushed[0][0], pushed[1][0])
    np.testing.assert_allclose(pushed[0][1], pushed[1][1], rtol=0.01)
    expected = jax.grad(penalty(net_by_hand))(W, X)
    np.testing.assert_allclose(jax.grad(penalty(cast))(W, X), expected, rtol=0.02, atol=0.01)
    inside = jax.grad(mpjax.autocast(penalty(net), half))(W, X)
    assert inside.dtype == F32
    reference = jax.grad(penalty(net))(W, X)
    assert jnp.linalg.norm(inside - reference) < 0.02 * jnp.linalg.norm(reference)


def test_it_is_traced_once_for_equal_inputs():
    calls = []

    def fn(x, w):
        calls.append(1)
        return x @ w

    step = jax.jit(mpjax.autocast(fn, "float16"))
    for shift in range(3):
        step(X + shift, W)
    assert len(calls) == 1


def test_an_exception_leaves_no_state_behind():
    def broken(x, w):
        _ = x @ w
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mpjax.autocast(broken, "float16")(X, W)
    assert (X @ W).dtype == F32
    assert mpjax.autocast(jnp.matmul, "float16")(X, W).dtype == jnp.float16
    assert mpjax.full_precision(jnp.matmul)(X, W).dtype == F32


def test_donated_buffers_of_a_jit_around_it():
    step = jax.jit(mpjax.autocast(lambda x, w: x - (x @ w) @ w.T, "float16"), donate_argnums=0)
    x = X + 0.0
    assert step(x, W).dtype == F32
    assert x.is_deleted()


@HALF
def test_full_precision_is_untouched_bit_for_bit(half):
    def region(x, w):
        return jax.nn.softmax(x @ w) @ w.T

    keep = mpjax.full_precision(region)
    cast = jax.jit(mpjax.autocast(lambda x, w: (keep(x, w), x @ w), half))
    kept, product = cast(X, W)
    assert_same(kept, jax.jit(region)(X, W))
    assert product.dtype == half
    grad = mpjax.autocast(jax.grad(lambda x, w: keep(x, w)[0, 0], argnums=(0, 1)), half)
    assert_same(jax.jit(grad)(X, W), jax.jit(jax.grad(lambda x, w: region(x, w)[0, 0], argnums=(0, 1)))(X, W))
    outside = jax.grad(mpjax.autocast(lambda x, w: keep(x, w)[0, 0], half), argnums=(0, 1))
    assert_same(jax.jit(outside)(X, W), jax.jit(jax.grad(lambda x, w: region(x, w)[0, 0], argnums=(0, 1)))(X, W))


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda f: jax.vmap(f, in_axes=(0, None))])
def test_full_precision_inside_other_constructs(wrap):
    keep = mpjax.full_precision(lambda x, w: x @ w)
    x = jnp.stack([X, X])
    assert_same(jax.jit(mpjax.autocast(wrap(keep), "float16"))(x, W), jax.jit(wrap(jnp.matmul))(x, W))


def test_full_precision_takes_leaves_that_are_no_arrays_and_nests():
    def region(x, w, kind, train=False):
        return (x @ w if train else x) + (1.0 if kind == "one" else 0.0)

    keep = mpjax.full_precision(region)
    assert_same(keep(X, W, "one", train=True), X @ W + 1.0)
    assert_same(mpjax.autocast(lambda x, w: keep(x, w, "one", train=True), "float16")(X, W), X @ W + 1.0)
    nested = mpjax.full_precision(lambda x, w: keep(x, w, "two", train=True))
    assert_same(mpjax.autocast(nested, "float16")(X, W), X @ W)
    again = mpjax.autocast(mpjax.autocast(nested, "float16"), "bfloat16")
    assert_same(again(X, W), X @ W)


def test_full_precision_gets_a_half_value_in_float32():
    cast = mpjax.autocast(lambda x, w: mpjax.full_precision(lambda z: z @ z.T)(x @ w), "float16")
    z = (X.astype(jnp.float16) @ W.astype(jnp.float16)).astype(F32)
    assert_same(cast(X, W), z @ z.T)


def test_names_of_jits_and_scopes_survive():
    @jax.jit
    def my_inner(x, w):
        with jax.named_scope("my_scope"):
            return x @ w

    text = jax.jit(mpjax.autocast(my_inner, "float16")).lower(X, W).as_text(debug_info=True)
    assert "my_inner" in text
    assert "my_scope" in text


def test_the_lines_of_the_user_survive():
    class Net:
        def forward(self, x, w):
            return x @ w

    jaxpr = jax.make_jaxpr(mpjax.autocast(Net().forward, "float16"))(X, W)
    (product,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    line = Net.forward.__code__.co_firstlineno + 1
    mine = [place for place in source_lines(product) if place.file == __file__]
    assert [(place.line, place.function) for place in mine[:1]] == [(line, "forward")]
    assert source_of([product]) == f"{__file__}:{line}"


def test_optimized_programs_have_the_operations_of_hand_placed_casts():
    def loss(params, x, cast):
        for w in params[:-1]:
            x = jax.nn.relu(cast(x) @ cast(w))
        return jnp.square((cast(x) @ cast(params[-1])).astype(F32)).sum()

    params, x = [jnp.ones((16, 16), F32), jnp.ones((16, 16), F32)], jnp.ones((8, 16), F32)

    def counts(fn):
        text = jax.jit(jax.grad(fn)).lower(params, x).compile().as_text()
        return {op: text.count(f" {op}(") for op in ("dot", "convert", "fusion", "custom-call")}

    by_hand = counts(lambda params, x: loss(params, x, lambda a: a.astype(jnp.bfloat16)))
    assert counts(mpjax.autocast(lambda params, x: loss(params, x, lambda a: a), "bfloat16")) == by_hand
    assert by_hand["dot"] + by_hand["custom-call"] > 0


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
        x = nn.LayerNorm()(nn.Dense(8)(x.reshape(x.shape[0], -1, 16)))
        x = nn.MultiHeadDotProductAttention(2)(x)
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x).mean(1))


def test_a_linen_model_with_statistics_and_dropout():
    model = Net()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        variables = jax.jit(model.init, static_argnums=2)(jax.random.key(0), IMAGE, False)

        def apply(params, stats, x, key):
            given = {"params": params, "batch_stats": stats}
            return model.apply(given, x, True, rngs={"dropout": key}, mutable=["batch_stats"])

        def loss(params, apply):
            out, stats = apply(params, variables["batch_stats"], IMAGE, jax.random.key(1))
            return out.astype(F32).sum(), (out, stats)

        cast = jax.jit(lambda p: jax.grad(loss, has_aux=True)(p, mpjax.autocast(apply, "bfloat16")))
        grads, (out, stats) = cast(variables["params"])
        _, (plain, plain_stats) = jax.jit(lambda p: loss(p, apply))(variables["params"])
    assert out.dtype == F32  # a product in half and a bias in float32
    np.testing.assert_allclose(out, plain, atol=0.1)
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, stats))} == {np.dtype("float32")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), stats, plain_stats)


def test_an_nnx_resnet_split_and_merged_keeps_float32_statistics():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = ResNet((1,), BasicBlock, SmallStem, channels=3, width=4, num_classes=4, rngs=nnx.Rngs(0))
        model.train()
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        images = IMAGE[..., :3]

        def forward(params, rest, x):
            merged = nnx.merge(graph, params, rest)
            out = merged(x)
            return out, nnx.state(merged, nnx.Not(nnx.Param))

        def loss(params, forward):
            out, rest_out = forward(params, rest, images)
            return jnp.square(out.astype(F32)).sum(), (out, rest_out)

        grads, (out, stats) = jax.jit(lambda p: jax.grad(loss, has_aux=True)(p, mpjax.autocast(forward, "float16")))(
            params
        )
        plain, plain_stats = jax.jit(forward)(params, rest, images)
    np.testing.assert_allclose(out.astype(F32), plain, atol=0.05)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01), stats, plain_stats)
    assert {leaf.dtype for leaf in jax.tree.leaves(stats) if leaf.ndim} == {np.dtype("float32")}


def test_training_with_a_scaled_loss_learns_in_float16():
    tx = mpjax.precision.dynamic_loss_scaling(optax.sgd(0.1), initial_scale=2.0**10)
    target = X @ W[:, :1]
    params = {"w": jnp.zeros((6, 1), F32)}

    def loss(params, x, y):
        return jnp.square(x @ params["w"] - y).mean()

    @jax.jit
    def step(params, state):
        value, grads = mpjax.scaled_value_and_grad(mpjax.autocast(loss, "float16"))(state, params, X, target)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    losses = []
    for _ in range(100):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.1 * losses[0]
    assert params["w"].dtype == F32


# Rules by named scope


def scoped(name, fn):
    def named(*args):
        with jax.named_scope(name):
            return fn(*args)

    return named


def half_product(x, w, half="float16"):
    return x.astype(half) @ w.astype(half)


@HALF
def test_a_float32_rule_computes_all_of_its_scope_in_float32(half):
    def keep(y, w):
        return jnp.tanh(y * 2.0) @ w, jnp.concatenate([y, y]), y + y

    def fn(x, w, v):
        return scoped("keep", keep)(x @ w, v)

    v = jnp.cos(jnp.arange(10.0, dtype=F32)).reshape(5, 2)
    y = half_product(X, W, half).astype(F32)  # the product before it is in half, and widened at the door
    # Not compiled as a whole: XLA may leave out the rounding of the product.
    assert_same(mpjax.autocast(fn, f"p=f32,c={half};keep=float32")(X, W, v), keep(y, v))


def test_a_half_rule_computes_the_products_of_its_scope_in_that_half_and_nothing_else():
    def fn(x, w):
        return x @ w, scoped("narrow", lambda x, w: (x @ w, jnp.exp(x), (x @ w).sum()))(x, w)

    outer, (product, exp, total) = mpjax.autocast(fn, "mixed_float16;narrow=bfloat16")(X, W)
    assert_same(outer, half_product(X, W))
    assert_same(product, half_product(X, W, "bfloat16"))
    assert_same(exp, jnp.exp(X))
    assert_same(total, half_product(X, W, "bfloat16").astype(F32).sum())


def test_under_a_float32_policy_a_half_rule_makes_half_of_its_scope_alone():
    def fn(x, w):
        z = scoped("narrow", lambda x, w: x @ w)(x, w)
        return x @ w, z, z + z

    outer, z, after = mpjax.autocast(fn, "float32;narrow=float16")(X, W)
    assert_same((outer, z), (X @ W, half_product(X, W)))
    assert_same(after, half_product(X, W).astype(F32) * 2.0)


def layer(x, w):
    return scoped("layer", scoped("conv", lambda x, w: x @ w))(x, w)


SQUARE = jnp.cos(jnp.arange(36.0, dtype=F32)).reshape(6, 6)
BODIES = {
    "plain": layer,
    "scan": lambda x, w: lax.scan(lambda c, _: (layer(c, w).astype(F32), None), x, None, length=2)[0],
    "while": lambda x, w: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, layer(c[1], w).astype(F32)), (jnp.int32(0), x)
    )[1],
    "cond": lambda x, w: lax.cond(x[0, 0] < 5.0, layer, lambda x, w: x, x, w),
    "jit": jax.jit(layer),
    "checkpoint": jax.checkpoint(layer),
    "vmap": lambda x, w: jax.vmap(layer, in_axes=(0, None))(x[:, None], w)[:, 0],
    "checkpoint in scan": lambda x, w: lax.scan(
        lambda c, _: (jax.checkpoint(layer)(c, w).astype(F32), None), x, None, length=2
    )[0],
}


@pytest.mark.parametrize("pattern", ["net/layer/conv", "net/layer", "net/*/conv", "*/conv"])
@pytest.mark.parametrize("name", BODIES)
def test_scopes_inside_control_flow_are_joined_to_those_around_it(name, pattern):
    def fn(x, w):
        return scoped("net", BODIES[name])(x, w), x @ w

    inside, outside = jax.jit(mpjax.autocast(fn, f"mixed_float16;{pattern}=float32"))(X, SQUARE)
    np.testing.assert_allclose(inside, jax.jit(BODIES[name])(X, SQUARE), rtol=1e-5, atol=1e-5)
    assert inside.dtype == F32
    assert outside.dtype == jnp.float16


@pytest.mark.parametrize("name", [name for name in BODIES if name != "while"])
def test_rules_hold_under_grad_jvp_and_vmap(name):
    def loss(x, w):
        return jnp.square(scoped("net", BODIES[name])(x, w)).sum()

    cast, half = (mpjax.autocast(loss, policy) for policy in ("mixed_float16;net/layer=float32", "mixed_float16"))
    stacked, tangents = jnp.stack([X, -X]), (X, SQUARE)
    for transformed in (
        lambda f: jax.grad(f, argnums=(0, 1))(X, SQUARE),
        lambda f: jax.jvp(f, (X, SQUARE), tangents),
        lambda f: jax.vmap(f, in_axes=(0, None))(stacked, SQUARE),
        lambda f: jax.vmap(jax.grad(f), in_axes=(0, None))(stacked, SQUARE),
    ):
        kept, full, rounded = jax.jit(lambda t=transformed: [t(f) for f in (cast, loss, half)])()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), kept, full)
        assert any(not np.allclose(a, b, rtol=2e-5, atol=2e-5) for a, b in zip(rounded, full, strict=True))


@pytest.mark.parametrize("name", ["plain", "scan", "jit", "cond"])
def test_rules_hold_where_the_derivative_is_inside(name):
    def loss(x, w):
        return jnp.square(scoped("net", BODIES[name])(x, w)).sum()

    grads = jax.jit(mpjax.autocast(jax.grad(loss, argnums=(0, 1)), "mixed_float16;net/layer=float32"))(X, SQUARE)
    full = jax.grad(loss, argnums=(0, 1))(X, SQUARE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), grads, full)


def test_the_first_rule_that_matches_a_scope_decides():
    def fn(x, w):
        return tuple(scoped(name, lambda x, w: x @ w)(x, w) for name in ("a/one", "a/two", "b"))

    cast = mpjax.autocast(fn, "mixed_float16;a/one=float32;a/*=bfloat16")
    assert [out.dtype.name for out in cast(X, W)] == ["float32", "bfloat16", "float16"]


def test_a_policy_as_a_rule_counts_by_its_compute_dtype():
    cast = mpjax.autocast(
        scoped("a", lambda x, w: x @ w), "mixed_float16;a=params=float16,compute=bfloat16,output=float32"
    )
    assert_same(cast(X, W), half_product(X, W, "bfloat16"))


def test_a_rule_for_no_scope_is_an_error_at_the_call_that_lists_the_nearest():
    def fn(x, w):
        return scoped("encoder", scoped("attention", lambda x, w: x @ w))(x, w)

    cast = mpjax.autocast(fn, "mixed_float16;encoder/atention=float32")
    with pytest.raises(UsageError, match="rule 'encoder/atention' matches nothing; nearest: encoder/attention"):
        cast(X, W)
    shadowed = mpjax.autocast(fn, "mixed_float16;encoder=float32;encoder/*=bfloat16")
    with pytest.raises(UsageError, match="'encoder/\\*' decides nothing: .* before it .'encoder'. .*; put it first"):
        shadowed(X, W)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("type:Head=float32", "rule 'type:Head': autocast sees named scopes, which have no type; write a path"),
        ("type:Conv=float32", "rule 'type:Conv': autocast sees named scopes, which have no type; write a path"),
        ("type:norm=float64", "rule 'type:norm': autocast sees named scopes"),
        ("Type:norm=bfloat16", "rule 'Type:norm': autocast sees named scopes"),
        ("type:softmax=float32", "rule 'type:softmax': autocast sees named scopes"),
        ("type:norm=float32;type:Conv=float16", "rule 'type:Conv': autocast sees named scopes"),
        ("type:norm=float16", "rule 'type:norm': .* Norms already compute in float32, by the lists of operations"),
        ("stem=float64", "rule 'stem': autocast computes in float16, bfloat16 or float32, not in float64"),
    ],
)
def test_rules_that_no_scope_can_have_are_errors_before_any_call(rule, says):
    with pytest.raises(UsageError, match=says):
        mpjax.autocast(jnp.matmul, f"mixed_float16;{rule}")


def test_a_rule_may_name_a_scope_that_this_call_does_not_open():
    cast = mpjax.autocast(jnp.matmul, "mixed_float16;dropout=float32", scopes=("dropout",))
    assert_same(cast(X, W), half_product(X, W))


def test_the_functions_keep_their_names():
    assert mpjax.autocast(jnp.matmul, "mixed_float16").__name__ == "matmul"
    assert mpjax.full_precision(jnp.matmul).__name__ == "matmul"


@pytest.mark.parametrize(
    ("operation", "dtype"), [(jnp.multiply, "float16"), (jnp.add, "float16"), (jnp.subtract, "float32")]
)
def test_only_the_difference_from_the_largest_is_in_float32(operation, dtype):
    cast = mpjax.autocast(lambda x, w: operation(x @ w, jnp.max(x @ w)), "float16")
    assert jax.eval_shape(cast, X, W).dtype == dtype


def test_the_difference_from_a_row_that_is_no_largest_stays_half():
    cast = mpjax.autocast(lambda x, w: x @ w - (x @ w)[:1], "float16")
    assert jax.eval_shape(cast, X, W).dtype == jnp.float16


def test_norms_in_float32_is_what_the_lists_say_anyway():
    assert_same(mpjax.autocast(jnp.matmul, "mixed_float16;type:norm=float32")(X, W), half_product(X, W))
    assert mpjax.autocast(jnp.matmul, "float32;stem=float32") is jnp.matmul  # nothing to cast


def test_a_region_of_full_precision_is_left_alone_in_a_scope_of_half_too():
    keep = mpjax.full_precision(lambda x, w: x @ w)
    cast = mpjax.autocast(scoped("narrow", lambda x, w: (keep(x, w), x @ w)), "float32;narrow=float16")
    assert_same(cast(X, W), (X @ W, half_product(X, W)))


def test_a_number_that_half_cannot_hold_is_at_home_in_a_float32_scope():
    def mask(y):
        return jnp.where(y > 100.0, y, -1e9) + 1e-8

    cast = mpjax.autocast(lambda x, w: scoped("keep", mask)(x @ w), "mixed_float16;keep=float32")
    assert_same(cast(X, W), jnp.full((4, 5), -1e9, F32))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(6, name="stem")(x), nn.Dense(6, name="tail")(x)


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Block(name="block")(x)


@pytest.mark.parametrize("pattern", ["*/stem", "Nested/block/stem"])
def test_modules_of_flax_linen_are_scopes(pattern):
    model = Nested()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        variables = model.init(jax.random.key(0), X)
        stem, tail = mpjax.autocast(model.apply, f"mixed_float16;{pattern}=float32")(variables, X)
        plain, _ = model.apply(variables, X)
    assert_same(stem, plain)
    assert not np.array_equal(tail, model.apply(variables, X)[1])


class NNXBlock(nnx.Module):
    def __init__(self):
        self.stem, self.tail = (nnx.Linear(6, 5, rngs=nnx.Rngs(seed)) for seed in (0, 1))

    def __call__(self, x):
        return self.stem(x), self.tail(x)


class NNXNested(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([NNXBlock(), NNXBlock()])

    def __call__(self, x):
        return self.blocks[0](x), self.blocks[1](x)


def test_modules_of_an_nnx_model_with_named_scopes_are_scopes():
    model = NNXNested()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain = model(X)
        mpjax.precision.name_scopes(model)
        graph, state = nnx.split(model)
        policy = "mixed_float16;blocks/1/stem=float32"
        cast = mpjax.autocast(lambda state, x: nnx.merge(graph, state)(x), policy)(state, X)
    same = [
        [np.array_equal(a, b) for a, b in zip(one, other, strict=True)] for one, other in zip(cast, plain, strict=True)
    ]
    assert same == [[False, False], [True, False]]


@HALF
def test_a_norm_of_half_values_squares_them_in_float32(half):
    a, b = jnp.full((2, 4), 10.0), jnp.full((4, 3), 8.0)
    norm = mpjax.autocast(lambda a, b: jnp.linalg.norm(a @ b), half)(a, b)
    assert norm.dtype == F32
    assert abs(float(norm) - 783.8367) < 1e-3


@HALF
def test_a_float32_array_made_inside_is_float32(half):
    one = jnp.ones((1, 1))

    def accumulate(w):
        total = jnp.zeros((1, 1), F32) + w @ (2048.0 * one)
        return total + w @ one

    assert_same(mpjax.autocast(accumulate, half)(one), jnp.full((1, 1), 2049.0))
    joined = mpjax.autocast(lambda w: jnp.concatenate([jnp.ones((1, 1), F32), w @ one]), half)(one)
    assert joined.dtype == F32


@HALF
def test_zeros_of_a_where_and_bounds_of_a_clip_do_not_widen(half):
    def fn(w):
        x = w @ w
        return jnp.where(x > 0, x, jnp.zeros_like(x)) + jax.nn.relu(x) + jnp.clip(x, 0, 6) * 2.0 / jnp.sqrt(8.0)

    assert mpjax.autocast(fn, half)(jnp.ones((2, 2))).dtype == half


def test_an_exponential_of_a_scalar_is_not_brought_to_half():
    out = mpjax.autocast(lambda w: (w @ w) * jnp.exp(jnp.float32(12.0)), "mixed_float16")(jnp.ones((1, 1)))
    assert abs(float(out[0, 0]) - 162754.8) < 1


def test_a_jitted_function_under_autocast_is_compiled_once():
    fn = mpjax.autocast(jax.jit(lambda w: jax.nn.softmax(jax.nn.relu(w @ w))), "mixed_float16")
    w = jnp.ones((3, 3))
    fn(w)
    before = control_flow._jitted.cache_info().misses
    fn(w)
    assert control_flow._jitted.cache_info().misses == before


CONSTANTS = ["bool", "int4", "uint4", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]


@pytest.mark.parametrize("make", [lambda dtype: jnp.ones((), dtype), lambda dtype: np.ones((), jnp.dtype(dtype))])
def test_a_function_may_close_over_a_constant_of_any_dtype(make):
    for constant in [jax.random.key(0), *map(make, [*CONSTANTS, "float8_e4m3fn", "float8_e5m2"])]:

        def fn(x, constant=constant):
            if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
                return (x @ x) * jax.random.uniform(constant, x.shape)
            return (x @ x) * jnp.real(jnp.asarray(constant).astype(jnp.complex64))

        program = str(jax.make_jaxpr(mpjax.autocast(fn, "mixed_float16"))(jnp.ones((4, 4))))
        assert "preferred_element_type=float16" in program or "f16[4,4] = dot_general" in program
