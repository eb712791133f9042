"""Under autocast a dtype that the program asks for itself wins."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpjax


KEY = jax.random.key(0)
DTYPES = ("float16", "bfloat16", "float32")

RANDOM = {
    "normal": jax.random.normal,
    "truncated_normal": lambda key, shape, dtype: jax.random.truncated_normal(key, -2, 2, shape, dtype),
    "gumbel": jax.random.gumbel,
    "uniform": jax.random.uniform,
    "laplace": jax.random.laplace,
    "exponential": jax.random.exponential,
    "gamma": lambda key, shape, dtype: jax.random.gamma(key, 2.0, shape, dtype),
}


# Each draw in one dtype, and one in all.
DRAWS = [("normal", dtype) for dtype in DTYPES[1:]] + list(zip(RANDOM, itertools.cycle(DTYPES), strict=False))


@pytest.mark.parametrize(("draw", "dtype"), DRAWS)
def test_random_numbers_are_those_of_their_dtype_bit_for_bit(draw, dtype):
    draw = functools.partial(RANDOM[draw], shape=(5,), dtype=jnp.dtype(dtype))
    found, wanted = mpjax.autocast(draw, "mixed_bfloat16")(KEY), draw(KEY)
    assert found.dtype == dtype
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.prod, jnp.mean, jnp.cumsum, jnp.cumprod])
def test_a_reduction_is_in_the_dtype_it_was_asked_for(reduce):
    asked = mpjax.autocast(lambda x: reduce(x, dtype=jnp.bfloat16), "mixed_float16")
    assert asked(jnp.ones(4)).dtype == jnp.bfloat16
    assert mpjax.autocast(reduce, "mixed_float16")(jnp.ones(4)).dtype == jnp.float32


def test_a_sum_of_a_half_argument_is_in_the_dtype_it_was_asked_for():
    asked = mpjax.autocast(lambda x: jnp.sum(x, dtype=jnp.bfloat16), "mixed_float16")
    assert asked(jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(("asked", "dtype"), [(None, "bfloat16"), (jnp.float32, "float32")])
def test_a_convolution_gives_the_dtype_it_was_asked_for(asked, dtype):
    def conv(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=asked
        )

    jaxpr = jax.make_jaxpr(mpjax.autocast(conv, "mixed_bfloat16"))(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)))
    (product,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "conv_general_dilated"]
    assert [var.aval.dtype.name for var in product.invars] == ["bfloat16", "bfloat16"]
    assert product.outvars[0].aval.dtype == dtype


@pytest.mark.parametrize(
    ("one", "other", "asked", "result"),
    [
        ("float8_e4m3fn", "float8_e4m3fn", None, "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e5m2", "float32", "float32"),
        ("float8_e4m3fn", "float8_e5m2", "bfloat16", "bfloat16"),
    ],
)
def test_a_product_of_float8_is_as_written(one, other, asked, result):
    def product(x, y):
        return lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=asked)

    arguments = jnp.ones((2, 3), one), jnp.ones((2, 3), other)
    jaxpr = jax.make_jaxpr(mpjax.autocast(product, "mixed_float16"))(*arguments)
    assert str(jaxpr) == str(jax.make_jaxpr(product)(*arguments))
    assert jaxpr.out_avals[0].dtype == result


def test_each_platform_keeps_its_own_branch_alone():
    def fn(x):
        return lax.platform_dependent(x @ x, cpu=lambda x: x * 2, cuda=jnp.sin, default=jnp.cos)

    half = mpjax.autocast(fn, "mixed_float16")
    text = jax.jit(half).lower(jnp.ones((2, 2))).as_text()
    assert "multiply" in text
    assert "sine" not in text
    assert "cosine" not in text
    assert np.array_equal(half(jnp.ones((2, 2))), np.full((2, 2), 4, np.float16))
    cuda = jax.jit(half).trace(jnp.ones((2, 2))).lower(lowering_platforms=("cuda",)).as_text()
    assert "sine" in cuda
    assert "cosine" not in cuda


class Counting(nnx.Module):
    """Holds numbers that are no arrays, and sets them when it is called."""

    def __init__(self, inner=None):
        self.calls = 0
        self.seen = None
        self.weight = nnx.Param(jnp.ones((2, 2)))
        self.inner = inner

    def __call__(self, x):
        self.calls += 1
        self.seen = x.shape
        x = x @ self.weight[...]
        return x if self.inner is None else self.inner(self.inner(x))


def test_plain_attributes_that_a_call_sets_are_set():
    model = Counting(Counting())
    call = mpjax.autocast(lambda model, x: model(x), "mixed_float16")
    for times in (1, 2):
        call(model, jnp.ones((3, 2)))
        assert (model.calls, model.seen, model.inner.calls) == (times, (3, 2), 2 * times)
    nnx.jit(call)(model, jnp.ones((5, 2)))
    assert (model.calls, model.seen, model.inner.calls) == (3, (5, 2), 6)
