"""A function that casts by itself keeps its dtypes and products, and gets sums in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.precision import apply_policy
from mpjax.precision.casting import has_own_code, with_sums_in_float32


X = jnp.ones((512, 4), jnp.bfloat16)


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (lambda x: jnp.cumsum(x, 0)[-1], 512),
        (lambda x: jax.ops.segment_sum(x, jnp.zeros(512, int), 1)[0], 512),
        (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (512, 1), (1, 1), "VALID")[0], 512),
    ],
    ids=["cumsum", "segment_sum", "window"],
)
def test_a_sum_of_512_ones_is_512_in_the_dtype_of_the_function(fn, wanted):
    found = with_sums_in_float32(fn)(X)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.full(4, wanted, jnp.bfloat16))


def test_products_exponentials_and_squares_stay_as_they_are():
    def fn(x):
        rows = x[jnp.zeros(512, int)]
        return jnp.exp(rows) * rows * rows, rows.T @ rows, jax.nn.softmax(rows)

    for found, own in zip(with_sums_in_float32(fn)(X / 3), fn(X / 3), strict=True):
        np.testing.assert_array_equal(found, own)


def test_maxima_pads_and_operations_with_scalars_stay_as_they_are():
    def fn(x):
        highest = jax.ops.segment_max(x, jnp.arange(512) % 3, 3)
        return highest, jnp.pad(x, 9, constant_values=x[3, 1]), x * x[5, 2] + x[7, 3], jnp.clip(x, x[2, 0], None)

    x = jax.random.normal(jax.random.key(0), (512, 4), jnp.bfloat16)
    for found, own in zip(with_sums_in_float32(fn)(x), fn(x), strict=True):
        np.testing.assert_array_equal(found, own)


def test_a_pad_with_zeros_has_no_such_sum():
    calls = []
    with_sums_in_float32(lambda x: calls.append(x) or jnp.pad(x, 9))(X)
    assert calls[1] is X


def test_a_function_without_such_sums_is_called_as_it_is():
    calls = []
    assert with_sums_in_float32(lambda x: calls.append(x) or x)(X) is X
    assert len(calls) == 2
    assert calls[1] is X


# A loss of a model under a policy

TERMS = 4000
ROWS, SEGMENTS = jnp.arange(TERMS) % 3, jnp.arange(TERMS) % 5
NODES = jnp.abs(jax.random.normal(jax.random.key(0), (16, 8)))


class Own(nnx.Module):
    """A layer, code of the user's, and a head."""

    def __init__(self, code):
        self.inner = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(8, 2, rngs=nnx.Rngs(1))
        self.code = code

    def __call__(self, x):
        return self.head(self.code(self.inner(x)))


def neighbours(h):
    return jax.ops.segment_sum(h[ROWS], SEGMENTS, 5) / 800


def slope(rows):
    """Zeros with the derivative of a sum of rows; their weights differ, and half precision loses the small ones."""
    weights = jnp.abs(jnp.sin(jnp.arange(float(TERMS))))[:, None]
    total = jnp.sum(rows.astype(jnp.float32) * weights, 0) / 100
    return total - jax.lax.stop_gradient(total)


def window(h):
    return nnx.avg_pool(jnp.tile(40 * h, (256, 1))[None], (4096,))[0]


def loop(h):
    def step(total, i):
        return total + jnp.sum(h * i.astype(h.dtype), 0).astype(jnp.float32) / TERMS, None

    return jax.lax.scan(step, jnp.zeros(8), jnp.ones(TERMS))[0]


@jax.custom_vjp
def rows_with_rule(h):
    return h[ROWS]


rows_with_rule.defvjp(lambda h: (h[ROWS], h), lambda h, g: (jnp.zeros_like(h).at[ROWS].add(g),))


@jax.custom_jvp
def rows_with_forward_rule(h):
    return h[ROWS]


rows_with_forward_rule.defjvp(lambda primals, tangents: (primals[0][ROWS], tangents[0][ROWS]))


CODE = {
    "derivative rule": lambda h: jnp.mean(rows_with_rule(h), 0),
    "derivative rule forward": lambda h: jnp.mean(rows_with_forward_rule(h), 0),
    "sum that asks": lambda h: jnp.sum(jnp.tile(h, (256, 1)), 0, dtype=h.dtype) / 4096,
    "neighbours": neighbours,
    "window": window,
    "loop": loop,
    "broadcast": lambda h: jnp.mean(h[:1] + jnp.zeros((TERMS, 8), h.dtype), 0),
    "repeat": lambda h: jnp.mean(jnp.repeat(h, 250, axis=0), 0),
    "resize": lambda h: jnp.mean(jax.image.resize(h, (TERMS, 8), "nearest"), 0),
    "cumsum": lambda h: jnp.cumsum(jnp.tile(h, (64, 1)), 0)[-1] / 1024,
    "scattered ties": lambda h: jax.ops.segment_max(h[ROWS], ROWS, 3),
    "scattered minima": lambda h: jax.ops.segment_min(h[ROWS], ROWS, 3),
    "pad with an element": lambda h: slope(jnp.pad(h, ((0, TERMS - 16), (0, 0)), constant_values=h[1, 1])),
    "bound of a clip": lambda h: slope(jnp.clip(jnp.full((TERMS, 8), -9, h.dtype), h[0, 0], None)),
    "scalar": lambda h: slope(jnp.zeros((TERMS, 8), h.dtype) + h[0, 0]),
    "power": lambda h: slope(jnp.full((TERMS, 8), 2, h.dtype) ** h[0, 0]),
    "many reads": lambda h: sum(jnp.tanh(h * (1 + i / 64)) / 64 for i in range(64)),
}


def value_and_gradient(code, policy):
    model = Own(code)
    apply_policy(model, policy)
    graph, params = nnx.split(model)
    loss = lambda params: jnp.mean(nnx.merge(graph, params)(NODES).astype(jnp.float32))  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):  # Flax divides a window's sum by an integer
        value, gradient = jax.jit(jax.value_and_grad(with_sums_in_float32(loss)))(params)
    return value, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)])


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", CODE)
def test_values_and_gradients_are_near_those_of_float32(name, policy):
    (value, gradient), (wanted, of_float32) = (value_and_gradient(CODE[name], each) for each in (policy, "float32"))
    np.testing.assert_allclose(value, wanted, rtol=0.03)
    assert float(jnp.linalg.norm(gradient - of_float32) / jnp.linalg.norm(of_float32)) < 0.01


def test_a_model_whose_state_changes_is_updated_once():
    class Stateful(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return {"y": neighbours(self.dropout(self.norm(x))), "name": "cat", "count": 3}

    model = Stateful()
    apply_policy(model, "mixed_bfloat16")
    model.train()
    found = with_sums_in_float32(lambda model, x: model(x))(model, NODES)
    np.testing.assert_allclose(model.norm.mean[...], 0.5 * NODES.mean(0), rtol=1e-3)
    assert model.dropout.rngs.count[...] == 1
    assert (found["y"].dtype, found["name"], found["count"]) == (jnp.float32, "cat", 3)


def test_a_function_that_does_more_than_a_trace_says_is_called_as_it_is():
    cache, variable, outside = {}, nnx.Cache(jnp.zeros(())), nnx.BatchStat(jnp.zeros(()))

    def into(x, cache):
        cache["last"] = neighbours(x.astype(jnp.bfloat16))
        return cache["last"]

    def counted(x, variable):
        variable[...] += 1
        return neighbours(x.astype(jnp.bfloat16))

    for function, given in ((into, cache), (counted, variable), (lambda x, _: counted(x, outside), None)):
        assert with_sums_in_float32(function)(NODES, given).shape == (5, 8)
    assert cache["last"].shape == (5, 8)
    assert (variable[...], outside[...]) == (1, 1)


@jax.jit
def doubled(x):
    return 2 * x


class Renamed(nnx.Linear):
    """A layer of Flax's with a method of the user's, which a loss may call."""

    def features(self, x):
        return neighbours(self(x))


RNGS = nnx.Rngs(0)


@pytest.mark.parametrize(
    ("function", "is_own"),
    [
        (nnx.relu, False),
        (jax.nn.gelu, False),
        (jnp.tanh, False),
        (nnx.Dropout(0.5), False),
        (neighbours, True),
        (doubled, True),
        (lambda x: x[ROWS], True),
        (functools.partial(nnx.avg_pool, window_shape=(64, 64)), True),
        (Own(jnp.sin), True),
        (Renamed(2, 2, rngs=RNGS), True),
        (nnx.MultiHeadAttention(2, 4, attention_fn=lambda query, key, value, **options: query, rngs=RNGS), True),
        (nnx.LSTMCell(2, 2, activation_fn=doubled, rngs=RNGS), True),
        (nnx.jit(neighbours), True),
        (nnx.remat(neighbours), True),
        (jax.vmap(neighbours), True),
        (rows_with_rule, True),
    ],
    ids=[
        *("relu", "gelu", "tanh", "dropout", "function", "compiled", "lambda", "pool", "module", "method"),
        *("attention", "activation", "nnx.jit", "nnx.remat", "vmap", "derivative rule"),
    ],
)
@pytest.mark.parametrize("nested", [False, True], ids=["in the model", "in a part"])
def test_code_of_the_users_is_told_from_that_of_flax(function, is_own, nested):
    layers = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), function)
    assert has_own_code(nnx.Sequential(layers, nnx.relu) if nested else layers) is is_own
    assert has_own_code(nnx.eval_shape(lambda: layers)) is is_own


def test_layers_of_flax_hold_no_code_of_the_users():
    rngs = nnx.Rngs(0)
    for layer in (
        nnx.BatchNorm(2, rngs=rngs),
        nnx.Conv(2, 2, (3, 3), rngs=rngs),
        nnx.Einsum("ab,bc->ac", (2, 2), rngs=rngs),
        nnx.MultiHeadAttention(2, 4, rngs=rngs),
        nnx.RNN(nnx.LSTMCell(2, 2, rngs=rngs)),
        nnx.WeightNorm(nnx.Linear(2, 2, rngs=rngs), rngs=rngs),
    ):
        apply_policy(layer, "mixed_bfloat16")
        assert not has_own_code(layer)
