"""Inputs that a program uses in half precision only: casting them earlier changes no bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.precision.casting import cast_once, narrowed_inputs


B16, F16 = jnp.bfloat16, jnp.float16
ROWS = jnp.asarray([0, 2, 0, 1])


def half(w):
    return w.astype(B16)


def total(x):
    return jnp.sum(x.astype(jnp.float32) ** 2)


@jax.custom_jvp
def doubled(w):
    return half(w) * B16(2)


@doubled.defjvp
def _(primals, tangents):
    return doubled(*primals), half(tangents[0]) * B16(2)


@jax.custom_vjp
def product(w):
    return half(w) * B16(3)


product.defvjp(lambda w: (product(w), None), lambda _, g: (g.astype(jnp.float32) * jnp.float32(1.001),))


@jax.custom_vjp
def reading_backward(w):
    return half(w)


reading_backward.defvjp(lambda w: (half(w), w), lambda w, g: (g.astype(jnp.float32) * w,))


def looped(w):
    def body(carry, x):
        return carry + half(w) * x, None

    return jax.lax.scan(body, jnp.zeros((3, 2), B16), jnp.arange(3, dtype=B16))[0]


def carried(w):
    return jax.lax.scan(lambda carry, _: (carry * jnp.float32(1.1), None), w, length=2)[0]


def rows_of_a_scan(w):
    return jax.lax.scan(lambda carry, row: (carry + half(row), None), jnp.zeros(2, B16), w)[0]


def rows_given_back(w):
    total, rows = jax.lax.scan(lambda carry, row: (carry + half(row), row), jnp.zeros(2, B16), w)
    return total + half(jnp.sum(rows))


def branched(other):
    def run(w):
        return jax.lax.cond(jnp.asarray(True), lambda w: half(w) * B16(2), other, w)

    return run


def counted(w):
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + half(w)), (0, jnp.zeros((3, 2), B16)))[1]


# The program, and whether its input is narrow: used in bfloat16 only, and cast there in one place.
PROGRAMS = {
    "a cast": (half, True, True),
    "no cast": (lambda w: w, False, False),
    "a cast and a use": (lambda w: half(w).astype(jnp.float32) * w, False, False),
    "a use of the shape alone": (lambda w: half(w) * B16(w.shape[0]), True, True),
    "tied weights": (lambda w: (lambda h: h @ h.T)(half(w)), True, True),
    "tied weights, cast twice": (lambda w: half(w) @ half(w.T), True, False),
    "two half precisions": (lambda w: half(w).astype(jnp.float32) * w.astype(F16).astype(jnp.float32), False, False),
    "there and back": (lambda w: half(w).astype(jnp.float32) * jnp.float32(1.1), True, True),
    "moves": (lambda w: half(w.T.reshape(6)[::-1][1:4]), True, True),
    "rows": (lambda w: half(w[ROWS]), True, False),
    "rows after the cast": (lambda w: half(w)[ROWS], True, True),
    "one row": (lambda w: half(jax.lax.dynamic_slice(w, (1, 0), (1, 2))), True, True),
    "repeats": (lambda w: half(jnp.broadcast_to(w[None], (5, 3, 2))), True, False),
    "jit": (jax.jit(half), True, True),
    "jit without a cast": (jax.jit(lambda w: w + jnp.float32(1)), False, False),
    "jit that returns it": (lambda w: half(jax.jit(lambda w: w)(w)), None, None),
    "remat": (jax.checkpoint(lambda w: jnp.sin(half(w))), True, True),
    "scan over a constant": (looped, True, False),
    "scan over a carry": (carried, False, False),
    "scan over rows": (rows_of_a_scan, True, True),
    "scan over rows that are also given back": (rows_given_back, False, False),
    "cond": (branched(half), True, False),
    "cond with a branch that does not cast": (branched(lambda w: half(w * jnp.float32(1.01))), False, False),
    "while": (counted, False, False),
    "custom_jvp": (doubled, True, False),
    "custom_vjp": (product, True, False),
    "custom_vjp that reads it backward": (reading_backward, False, False),
    "a sum of its own": (lambda w: half(jax.lax.reduce(w, jnp.float32(0), jax.lax.add, (0,))), False, False),
    "a sum that casts inside": (
        lambda w: jax.lax.reduce(w[:1], jnp.float32(0), lambda a, b: (half(a) + half(b)).astype(jnp.float32), (0,)),
        False,
        False,
    ),
    "concatenated": (lambda w: half(jnp.concatenate([w, w])), False, False),
}


def narrow(fn, w):
    """What is said about the gradient, and about the loss alone."""
    return (
        narrowed_inputs(jax.make_jaxpr(jax.value_and_grad(fn))(w).jaxpr)[0],
        cast_once(jax.make_jaxpr(fn)(w).jaxpr)[0],
    )


def bits(tree):
    return [(np.asarray(x).tobytes(), str(x.dtype)) for x in jax.tree.leaves(tree)]


def result(fn, w):
    value, grad = jax.value_and_grad(fn)(w)
    return bits((value, grad.astype(jnp.float32)))


def weights(seed=0):
    return jax.random.normal(jax.random.key(seed), (3, 2))


DIFFERENTIABLE = [name for name in PROGRAMS if name not in ("while", "a sum that casts inside")]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_what_is_said_of_a_program(name):
    program, narrows, once = PROGRAMS[name]
    if narrows is None:
        return  # either answer is right
    assert narrow(lambda w: total(program(w)), weights()) == (B16 if narrows else None, once)


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(DIFFERENTIABLE)))
def test_loops_and_reductions_of_ones_own_are_never_narrow(name):
    jaxpr = jax.make_jaxpr(PROGRAMS[name][0])(weights()).jaxpr
    assert (narrowed_inputs(jaxpr), cast_once(jaxpr)) == ([None], [False])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_casting_a_narrow_input_early_changes_no_bit_of_the_loss_and_the_gradient(name):
    def loss(w):
        return total(PROGRAMS[name][0](w))

    w = weights()
    dtype, once = narrow(loss, w)
    if dtype is not None:
        assert result(loss, w.astype(dtype).astype(jnp.float32)) == result(loss, w)
    if once:  # the program may be given the half-precision value itself
        assert result(loss, w.astype(dtype)) == result(loss, w)
    assert dtype is not None or not once


MOVES = {
    "transpose": lambda w: w.T,
    "reshape": lambda w: w.reshape(-1, 1),
    "rows": lambda w: w[jnp.asarray([0, 0])],
    "reverse": lambda w: w[::-1],
    "broadcast": lambda w: jnp.broadcast_to(w[None], (2, *w.shape)),
    "cast": half,
    "jit": jax.jit(lambda w: w[:1]),
    "remat": jax.checkpoint(half),
    "relu": jax.nn.relu,
    "product": lambda w: w * w,
    "softmax": jax.nn.softmax,
    "scan": lambda w: jax.lax.scan(lambda c, _: (c + half(w).astype(w.dtype), None), jnp.zeros_like(w), length=3)[0],
}


@settings(max_examples=20)
@given(names=st.lists(st.sampled_from(sorted(MOVES)), max_size=4), seed=st.integers(0, 5))
def test_also_in_chains_of_operations(names, seed):
    def loss(w):
        for name in names:
            w = MOVES[name](w)
        return total(w)

    w = weights(seed)
    dtype, once = narrow(loss, w)
    if dtype is not None:
        assert result(loss, w.astype(dtype).astype(jnp.float32)) == result(loss, w)
    if once:
        assert result(loss, w.astype(dtype)) == result(loss, w)


def test_an_input_that_is_not_used_is_not_narrow():
    jaxpr = jax.make_jaxpr(lambda w, unused: half(w))(weights(), weights()).jaxpr
    assert (narrowed_inputs(jaxpr), cast_once(jaxpr)) == ([B16, None], [True, False])


def test_an_input_that_is_returned_as_it_is_too_is_not_narrow():
    jaxpr = jax.make_jaxpr(lambda w: (half(w), w))(weights()).jaxpr
    assert (narrowed_inputs(jaxpr), cast_once(jaxpr)) == ([None], [False])
