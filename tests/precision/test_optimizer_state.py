"""What an optimizer sees of half-precision parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.precision import master_weights, no_loss_scaling, parameters_seen, stochastic_weights


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


HALF = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16), "v": jnp.ones(2), "count": jnp.ones(2, int)}


def where_half(params):
    return jax.tree.map(lambda p: p.dtype.itemsize == 2, params)


@pytest.mark.parametrize(
    ("inner", "seen"),
    [
        (optax.adamw(1e-3), "float32"),
        (optax.MultiSteps(optax.sgd(0.1), 2), "float32"),
        (master_weights(optax.sgd(0.1)), "float16"),
        (optax.chain(optax.clip(1.0), stochastic_weights(optax.sgd(0.1))), "float16"),
        (optax.masked(optax.sgd(0.1, momentum=0.9), where_half), "float16"),
    ],
    ids=["adamw", "accumulated", "masters", "stochastic", "masked by dtype"],
)
def test_it_sees_float32_unless_it_tells_dtypes_apart(inner, seen):
    found = parameters_seen(inner, HALF)
    assert (str(found["w"].dtype), str(found["v"].dtype), str(found["count"].dtype)) == (seen, "float32", "int32")


def test_float32_parameters_are_seen_as_they_are():
    params = {"v": HALF["v"]}
    assert parameters_seen(optax.adam(0.1), params) is params
    assert parameters_seen(optax.adam(0.1), None) is None


def test_the_norm_of_half_parameters_is_a_sum_in_float32():
    """In float16, 1,000 squares of 16 are inf, and a trust ratio of them is no ratio."""
    params = {"w": jnp.full(1000, 16.0, jnp.float16)}
    tx = no_loss_scaling(optax.scale_by_trust_ratio())
    updates, _ = tx.update({"w": jnp.ones(1000, jnp.float16)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], 16.0, rtol=1e-3)
