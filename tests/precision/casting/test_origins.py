"""Which arrays of a call are parameters: by the modules among its arguments, or by the program."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.precision.casting import Origin, origins_of


X = jnp.ones((4, 4))
PARAMETERS, UNKNOWN, BATCH, NUMBERS = Origin.PARAMETERS, Origin.UNKNOWN, Origin.BATCH, Origin.NUMBERS


def found(fn, *args):
    """Returns the origins of the arguments' arrays, and that of arrays closed over."""
    arrays, treedef = jax.tree.flatten(args)
    jaxpr = jax.make_jaxpr(lambda *arrays: fn(*jax.tree.unflatten(treedef, arrays)))(*arrays)
    return origins_of((None, (fn, args, {})), jaxpr)


def two_layers(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]


def in_scan(params, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack(params))[0]


def in_loop(params, x):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ params[0] @ params[1]), x)


def in_branches(params, x):
    return jax.lax.cond(x.sum() > 0, lambda: two_layers(params, x), lambda: x)


@pytest.mark.parametrize(
    "fn",
    [
        two_layers,
        in_scan,
        in_loop,
        in_branches,
        jax.jit(two_layers),
        jax.checkpoint(two_layers),
        lambda params, x: jax.vmap(lambda row: two_layers(params, row))(x),
    ],
    ids=["plain", "scan", "loop", "cond", "jit", "checkpoint", "vmap"],
)
def test_parameters_are_what_multiplies_results_of_their_own(fn):
    assert found(fn, [X, X], X) == ([PARAMETERS, PARAMETERS, BATCH], UNKNOWN)
    assert found(lambda x, params: fn(params, x), X, [X, X]) == ([BATCH, PARAMETERS, PARAMETERS], UNKNOWN)


def test_parameters_that_a_function_has_closed_over_are_known_too():
    assert found(lambda x: two_layers([X, X + 1], x), X) == ([BATCH], PARAMETERS)


@pytest.mark.parametrize("fn", [jnp.dot, lambda q, k: jax.nn.softmax(q @ k.T), lambda x, y: x + y])
def test_of_two_arrays_it_is_not_known_which_is_a_weight(fn):
    assert found(fn, X, X) == ([UNKNOWN, UNKNOWN], UNKNOWN)


def test_random_keys_do_not_make_a_weight_an_activation():
    def fn(params, key, x):
        return two_layers([params[0] * jax.random.normal(key, (4, 4)), params[1]], x)

    assert found(fn, [X, X], jax.random.key(0), X)[0] == [PARAMETERS, PARAMETERS, NUMBERS, BATCH]


def test_the_state_of_a_module_is_parameters():
    layer = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    state = nnx.state(layer, nnx.Param)
    jaxpr = jax.make_jaxpr(jnp.dot)(X, X)
    assert origins_of((state, (jnp.dot, (None, X), {})), jaxpr) == ([PARAMETERS, BATCH], UNKNOWN)


def test_an_equinox_module_is_parameters():
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0))
    assert found(lambda layer, x: layer(x[0]), layer, X) == ([PARAMETERS, BATCH], UNKNOWN)
