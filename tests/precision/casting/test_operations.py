"""The lists: what is in them, and how a user moves a primitive."""

import itertools

import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import mpjax
from mpjax.errors import UsageError
from mpjax.precision.casting import OPERATIONS


X = jnp.linspace(0.1, 1.0, 16, dtype=jnp.float32).reshape(4, 4)


@pytest.mark.parametrize(
    ("primitive", "rule"),
    [
        *((name, "low") for name in ("dot_general", "conv_general_dilated", "ragged_dot_general")),
        *((name, "full") for name in ("exp", "log", "log1p", "expm1", "pow", "integer_pow", "square", "rsqrt")),
        *((name, "full") for name in ("erf_inv", "reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp")),
        *((name, "widest") for name in ("add", "mul", "concatenate", "select_n", "scatter-sub", "split", "tanh")),
        *((name, "as_traced") for name in ("fft", "svd", "pallas_call", "pure_callback", "no_such_primitive")),
    ],
)
def test_the_rule_of_a_primitive(primitive, rule):
    assert OPERATIONS.rule(primitive) == rule


@pytest.mark.parametrize(
    ("moved", "fn", "dtype"),
    [
        ({"low": ["tanh"]}, jnp.tanh, "float16"),
        ({"low": ["reduce_sum"]}, jnp.sum, "float16"),
        ({"full": ["dot_general"]}, lambda x: x @ x, "float32"),
        ({"full": ["tanh"]}, lambda x: jnp.tanh(x @ x), "float32"),
        ({"widest": ["exp"]}, lambda x: jnp.exp(x @ x), "float16"),
    ],
)
def test_a_moved_primitive_runs_in_its_new_dtype(moved, fn, dtype):
    assert mpjax.autocast(fn, "float16", operations=OPERATIONS.adding(**moved))(X).dtype == dtype


def test_a_primitive_of_ones_own_is_given_as_it_is():
    mine = Primitive("mine")
    assert OPERATIONS.adding(widest=[mine]).rule("mine") == "widest"
    assert OPERATIONS.adding(low=[mine]).rule("mine") == "low"
    assert OPERATIONS.rule("mine") == "as_traced"


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        ({"full": ["dot_genral"]}, "JAX has no primitive 'dot_genral'; did you mean dot_general"),
        ({"full": ["reduces"]}, r"did you mean reduce, reduce_\w+, reduce_\w+\? Pass a primitive"),
        ({"low": ["softmax"]}, "JAX has no primitive 'softmax'"),
        ({"widest": "tanh"}, r"wanted a list of primitives, as in \['tanh'\], got 'tanh'"),
        ({"low": ["jit"]}, "control flow and calls have no dtype of their own: jit"),
    ],
)
def test_what_is_no_primitive_is_an_error(lists, says):
    with pytest.raises(UsageError, match=says):
        OPERATIONS.adding(**lists)


@pytest.mark.parametrize("lists", list(itertools.combinations(("low", "full", "widest"), 2)), ids="-".join)
def test_a_primitive_in_two_lists_is_an_error_that_names_it(lists):
    with pytest.raises(UsageError, match="two lists: tanh"):
        OPERATIONS.adding(**{name: ["tanh"] for name in lists})


@pytest.mark.parametrize("name", ["low", "full", "widest"])
def test_a_primitive_is_moved_and_no_other(name):
    moved = OPERATIONS.adding(**{name: ["tanh"]})
    for each in ("low", "full", "widest"):
        assert getattr(moved, each) - {"tanh"} == getattr(OPERATIONS, each) - {"tanh"}
        assert ("tanh" in getattr(moved, each)) == (each == name)


def test_a_primitive_is_in_one_list():
    lists = OPERATIONS.low, OPERATIONS.full, OPERATIONS.widest
    assert len(frozenset().union(*lists)) == sum(map(len, lists))


def test_the_lists_can_be_printed():
    low, full, widest = str(OPERATIONS).splitlines()
    assert low == "low: conv_general_dilated, dot_general, ragged_dot, ragged_dot_general"
    assert full.startswith("float32: acos, acosh, asin")
    assert ", add, " in widest
