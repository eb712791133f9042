"""Which values of a traced program have fewer bits than their dtype."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from mpjax.plan import traced_program


X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def rounded(fn):
    """Returns what the first result of a function of one float32 array was rounded to."""
    return traced_program(jax.make_jaxpr(fn)(X)).rounded[0]


def through(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (through, "bfloat16"),
        (lambda x: through(x).T.reshape(-1)[:3], "bfloat16"),
        (lambda x: jnp.where(x > 0, through(x), x), "bfloat16"),
        (lambda x: jnp.concatenate([x, through(x)]), "bfloat16"),
        (lambda x: through(x) * jnp.float32(3), "bfloat16"),
        (lambda x: through(x) / jnp.float32(3), "bfloat16"),
        (lambda x: jax.lax.optimization_barrier((through(x), x))[0], "bfloat16"),
        (lambda x: jax.lax.optimization_barrier((through(x), x))[1], ""),
        (lambda x: jax.lax.reduce_precision(x, 8, 7), "bfloat16"),
        (lambda x: jax.lax.reduce_precision(x, 8, 10), "tensorfloat32"),
        (lambda x: jax.lax.reduce_precision(x, 5, 4), "float10_e5m4"),
        (lambda x: jax.lax.reduce_precision(x, 8, 23), ""),
        (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), "float8_e4m3fn"),
        (lambda x: (x.astype(jnp.bfloat16) + x.astype(jnp.bfloat16)).astype(jnp.float32), "bfloat16"),
        (jax.jit(through), "bfloat16"),
        (lambda x: jax.lax.scan(lambda c, _: (through(c), None), x, length=2)[0], "bfloat16"),
        (lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) > 0, through, x), "bfloat16"),
        (lambda x: jax.lax.cond(x[0, 0] > 0, through, lambda x: x, x), "bfloat16"),
        (lambda x: x, ""),
        (lambda x: jnp.tanh(through(x)), ""),
        (lambda x: through(x) + x, ""),
        (lambda x: through(x) * through(x), ""),
        (lambda x: jnp.float32(3) / through(x), ""),
        (lambda x: x.astype(jnp.float16).astype(jnp.int32), ""),
    ],
)
def test_a_value_has_the_bits_of_the_narrowest_cast_since_it_was_computed(fn, dtype):
    with jax.numpy_dtype_promotion("standard"):
        assert rounded(fn) == dtype


def in_half(fn):
    return lambda x: fn(x.astype(jnp.bfloat16)).astype(jnp.float32)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (through, "bfloat16"),
        (in_half(lambda x: -x.T), "bfloat16"),
        (in_half(lambda x: x * 3), "bfloat16"),
        (in_half(lambda x: x / x[0, 0]), "bfloat16"),
        (in_half(lambda x: x[:, :1] * x), "bfloat16"),
        (in_half(lambda x: x + x), ""),
        (in_half(lambda x: x * x[::-1]), ""),
        (in_half(lambda x: x / (x + 1)), ""),
        (in_half(lambda x: 3 / x), ""),
        (in_half(jnp.square), ""),
    ],
)
def test_an_addend_is_cast_if_it_was_only_moved_or_scaled_since(fn, dtype):
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    total = jax.shard_map(lambda x: jax.lax.psum(fn(x), "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    with jax.numpy_dtype_promotion("standard"):
        assert traced_program(jax.make_jaxpr(total)(X)).cast == (dtype,)


def test_what_was_given_in_few_bits_was_not_rounded():
    half = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
    assert traced_program(jax.make_jaxpr(lambda x: x.astype(jnp.float32))(half)).rounded == ("",)


def test_an_operand_that_an_iteration_rounds_for_the_next_one_is_told():
    def fn(x):
        return jax.lax.scan(lambda x, _: (through(x @ jnp.ones((4, 4), jnp.float32)), None), x, length=3)[0]

    (product,) = traced_program(jax.make_jaxpr(fn)(X)).products
    assert product.rounded == ("bfloat16",)
