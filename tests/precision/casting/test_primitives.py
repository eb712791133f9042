"""What each primitive of JAX is to mpjax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision.casting import (
    CALLS,
    CONTROL_FLOW,
    ELEMENTWISE,
    ENTERED,
    MATRIX_PRODUCTS,
    OPERATIONS,
    PRODUCTS,
    SUMS,
)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_numpy_computes_an_elementwise_primitive_to_the_same_bits(name):
    x, y = (np.random.default_rng(seed).normal(size=50).astype(np.float32) * 1e3 for seed in (0, 1))
    given = (x, y) if name in ("add", "sub", "mul", "max", "min") else (x,)
    np.testing.assert_array_equal(ELEMENTWISE[name]({}, *given), getattr(jax.lax, name)(*given))


def test_a_primitive_is_one_thing():
    kinds = [CALLS, CONTROL_FLOW, MATRIX_PRODUCTS, SUMS, PRODUCTS]
    assert len(frozenset().union(*kinds)) == sum(map(len, kinds))
    assert {"shard_map"} == ENTERED - CALLS - CONTROL_FLOW


def test_a_function_that_xla_builds_from_several_operations_is_a_product():
    assert "logistic" in PRODUCTS
    assert jax.lax.logistic(jnp.bfloat16(6)) == 1.0  # rounded once, it would be 0.99609375


def test_products_compute_in_half_precision_and_sums_in_float32():
    assert {OPERATIONS.rule(name) for name in MATRIX_PRODUCTS} == {"low"}
    assert {OPERATIONS.rule(name) for name in ("reduce_sum", "reduce_window_sum", "cumsum")} == {"full"}
