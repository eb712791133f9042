"""Autocast says when no product of a function is in float8, though its policy asks for it."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax.errors import PrecisionWarning, UsageError
from mpjax.precision.float8 import note, noted


SMALL, LARGE = jnp.ones((16, 16)), jnp.ones((64, 64))


def test_products_are_noted_in_the_innermost_list():
    with noted() as outer:
        note(["one"])
        with noted() as inner:
            note(["two"])
    note(["three"])
    assert (outer, inner) == (["one"], ["two"])


def test_a_function_without_a_product_in_float8_says_why_once():
    fn = mpjax.autocast(jnp.dot, "mixed_float8")
    with pytest.warns(PrecisionWarning, match=r"1 with a side below 64 .* Write mixed_bfloat16"):
        fn(SMALL, SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn(SMALL, SMALL)


def test_it_is_an_error_if_float8_is_required():
    fn = mpjax.autocast(jnp.dot, "mixed_float8", require_float8=True)
    with pytest.raises(UsageError, match="no product of the function is in float8"):
        fn(SMALL, SMALL)
    fn(LARGE, LARGE)


@pytest.mark.parametrize(
    ("fn", "policy"),
    [
        (jnp.dot, "mixed_float8"),
        (jax.jit(jnp.dot), "mixed_float8"),
        (jax.checkpoint(jnp.dot), "mixed_float8"),
        (lambda x, w: jax.lax.fori_loop(0, 2, lambda i, x: x @ w, x), "mixed_float8"),
        (lambda x, w: x @ w, "mixed_float8;*=bfloat16"),
        (lambda x, w: x + w, "mixed_float8"),
        (lambda x, w: jax.lax.dot(*(a.astype(jnp.float8_e4m3fn) for a in (x, w))), "mixed_float8"),
        (lambda x, w: x[:16, :16] @ w[:16, :16], "mixed_bfloat16"),
    ],
    ids=["plain", "jit", "checkpoint", "loop", "taken out", "no product", "the user's own", "another policy"],
)
def test_others_say_nothing_also_when_called_again(fn, policy):
    cast = mpjax.autocast(fn, policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            cast(LARGE, LARGE)


def test_a_recipe_for_a_scope_without_a_large_product_is_told():
    def fn(x):
        with jax.named_scope("a"):
            return x @ x

    with pytest.warns(PrecisionWarning, match="a side below 64"):
        mpjax.autocast(fn, "mixed_bfloat16;a=float8")(SMALL)


def test_convolutions_alone_are_told():
    conv = nnx.Conv(64, 64, (3,), rngs=nnx.Rngs(0))
    with pytest.warns(PrecisionWarning, match="1 by conv_general_dilated"):
        mpjax.autocast(lambda conv, x: conv(x), "mixed_float8")(conv, jnp.ones((1, 8, 64)))
