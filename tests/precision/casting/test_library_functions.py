"""Under autocast, functions of JAX that are written for float32 compute in it, and bounds near 1 stay bounds."""

import itertools

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.stats
import numpy as np
import pytest

import mpjax
from mpjax.precision import BFLOAT16, FLOAT16


X = jax.random.normal(jax.random.key(0), (8, 8))
EYE = jnp.eye(8)

FUNCTIONS = {
    "expm": lambda h: jax.scipy.linalg.expm(4 * h),
    "cov": lambda h: jnp.cov(512 * h),
    "corrcoef": lambda h: jnp.corrcoef(512 * h),
    "norm": lambda h: jnp.linalg.norm(512 * h),
    "inv": jnp.linalg.inv,
    "det": lambda h: jnp.linalg.det(16 * h),
    "pinv": jnp.linalg.pinv,
    "matrix_power": lambda h: jnp.linalg.matrix_power(4 * h, 8),
    "cond": jnp.linalg.cond,
    "lstsq": lambda h: jnp.linalg.lstsq(h, h[0])[0],
    "polar": lambda h: jax.scipy.linalg.polar(h)[0],
    "solve": lambda h: jnp.linalg.solve(h, h[0]),
}


@pytest.mark.parametrize(
    ("name", "half"), list(zip(FUNCTIONS, itertools.cycle((FLOAT16, BFLOAT16)), strict=False)), ids=str
)
def test_a_function_of_a_half_precision_array_gives_what_it_gives_in_float32(name, half):
    found = jax.jit(mpjax.autocast(lambda x, w: FUNCTIONS[name](x @ w), f"p=f32,c={half}"))(X, EYE)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, jax.jit(FUNCTIONS[name])(X.astype(half).astype(jnp.float32)))


def test_products_by_another_name_stay_in_half_precision():
    for product in (jnp.linalg.matmul, jnp.linalg.multi_dot, jnp.linalg.vecdot, jnp.linalg.tensordot):
        call = (lambda x: product([x, x])) if product is jnp.linalg.multi_dot else lambda x: product(x, x)  # noqa: B023
        assert mpjax.autocast(call, "mixed_bfloat16")(X).dtype == jnp.bfloat16, product


@pytest.mark.parametrize("half", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("margin", [1e-2, 1e-3, 1e-6, 1e-7])
@pytest.mark.parametrize(
    "bounded",
    [
        lambda p, most: jnp.clip(p, 1 - most, most),
        jnp.minimum,
        lambda p, most: -jnp.maximum(-p, -most),
        lambda p, most: jnp.where(p > most, most, p),
        lambda p, most: jax.lax.clamp(0.0, p, most),
    ],
)
def test_a_bound_near_one_keeps_a_probability_from_one(bounded, margin, half):
    found = mpjax.autocast(lambda x, w: jnp.log1p(-bounded(jax.nn.sigmoid(x @ w), 1 - margin)), f"p=f32,c={half}")(
        20 * EYE, EYE
    )
    np.testing.assert_allclose(found[0, 0], np.log1p(-np.float32(1 - margin)), rtol=1e-6)


def test_other_bounds_do_not_widen():
    for most in (6.0, 1.0, 0.1, 1e-3):
        assert mpjax.autocast(lambda x: jnp.clip(x @ x, -most, most), "mixed_float16")(X).dtype == jnp.float16  # noqa: B023
