"""Sums of many terms in the code of a user's own modules are in float32 under a policy, and so are their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.precision import apply_policy


TERMS = 4000
ROWS, SEGMENTS = jnp.arange(TERMS) % 3, jnp.arange(TERMS) % 5
X = jnp.abs(jax.random.normal(jax.random.key(0), (16, 8)))


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


def window(h):
    return nnx.avg_pool(jnp.tile(40 * h, (256, 1))[None], (4096,))[0]


def loop(h):
    def step(total, i):
        return total + jnp.sum(h * i.astype(h.dtype), 0).astype(jnp.float32) / TERMS, None

    return jax.lax.scan(step, jnp.zeros(8), jnp.ones(TERMS))[0]


CODE = {
    "neighbours": neighbours,
    "window": window,
    "loop": loop,
    "broadcast": lambda h: jnp.mean(h[:1] + jnp.zeros((TERMS, 8), h.dtype), 0),
    "repeat": lambda h: jnp.mean(jnp.repeat(h, 250, axis=0), 0),
    "resize": lambda h: jnp.mean(jax.image.resize(h, (TERMS, 8), "nearest"), 0),
    "cumsum": lambda h: jnp.cumsum(jnp.tile(h, (64, 1)), 0)[-1] / 1024,
    "many reads": lambda h: sum(jnp.tanh(h * (1 + i / 64)) / 64 for i in range(64)),
}


def value_and_gradient(code, policy):
    model = Own(code)
    apply_policy(model, policy)
    graph, params = nnx.split(model)
    loss = lambda params: jnp.mean(nnx.merge(graph, params)(X).astype(jnp.float32))  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):  # Flax divides a window's sum by an integer
        value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    return value, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)])


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", CODE)
def test_values_and_gradients_are_near_those_of_float32(name, policy):
    (value, gradient), (wanted, of_float32) = (value_and_gradient(CODE[name], each) for each in (policy, "float32"))
    np.testing.assert_allclose(value, wanted, rtol=0.03)
    assert float(jnp.linalg.norm(gradient - of_float32) / jnp.linalg.norm(of_float32)) < 0.01


def test_a_model_that_adds_little_is_called_as_it_is():
    """Its calls are counted: one to look, and one that runs."""
    calls = []
    model = Own(lambda h: calls.append(h) or h)
    apply_policy(model, "mixed_bfloat16")
    jaxpr = jax.make_jaxpr(model)(X)
    assert len(calls) == 2
    assert "call_jaxpr" not in str(jaxpr.eqns[0])
    apply_policy(model, "float32")
    model(X)
    assert len(calls) == 3


def test_statistics_random_streams_and_what_is_sown_are_updated_once():
    class Stateful(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
            self.head = nnx.Linear(8, 2, rngs=nnx.Rngs(2))

        def __call__(self, x):
            h = self.dropout(self.norm(x))
            self.sow(nnx.Intermediate, "hidden", h)
            return self.head(neighbours(h))

    model = Stateful()
    apply_policy(model, "mixed_bfloat16")
    model.train()
    y, sown = nnx.capture(model, nnx.Intermediate)(X)
    np.testing.assert_allclose(model.norm.mean[...], 0.5 * X.mean(0), rtol=1e-3)
    assert model.dropout.rngs.count[...] == 1
    assert y.shape == (5, 2)
    assert [leaf.shape for leaf in jax.tree.leaves(sown)] == [(16, 8)]
    assert y.dtype == jnp.float32


class Returns(nnx.Module):
    """Adds many rows in half precision and returns what `then` makes of the sum."""

    def __init__(self, then):
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.then = then

    def __call__(self, x, **given):
        return self.then(self, neighbours(self.layer(x)), **given)


class Found:
    """An object that JAX does not know."""

    def __init__(self, value):
        self.value = value


def test_what_is_returned_beside_arrays_stays_as_it_is():
    model = Returns(lambda model, y: {"y": y, "name": "cat", "count": 3, "none": None, "scale": 0.5, "flag": True})
    apply_policy(model, "mixed_bfloat16")
    found = jax.jit(lambda x: model(x)["y"])(X), model(X)
    assert {name: type(value) for name, value in found[1].items() if name != "y"} == {
        "name": str, "count": int, "none": type(None), "scale": float, "flag": bool
    }  # fmt: skip
    assert found[1]["y"].dtype == jnp.float32


def test_a_model_that_does_more_than_a_trace_says_is_called_as_it_is():
    def into(model, y, cache):
        cache["last"] = y
        return y

    cache, outside = {}, nnx.BatchStat(jnp.zeros(()))

    def elsewhere(model, y):
        outside[...] = outside[...] + 1
        return y

    for then, given in (
        (lambda model, y: Found(y), {}),
        (into, {"cache": cache}),
        (elsewhere, {}),
        (lambda model, y: nnx.Param(y), {}),
    ):
        model = Returns(then)
        apply_policy(model, "mixed_bfloat16")
        jax.block_until_ready(jax.tree.leaves(model(X, **given)))
    assert cache["last"].shape == (5, 8)
    assert outside[...] == 1


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x)])
def test_transformations_pass_through(transform):
    model = Own(lambda h: jnp.mean(jnp.repeat(h, 250, axis=-2), -2))
    apply_policy(model, "mixed_bfloat16")
    np.testing.assert_allclose(transform(model)(X[None])[0], model(X[None])[0], rtol=1e-2)
