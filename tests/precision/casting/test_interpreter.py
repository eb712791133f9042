"""Equations run again: what keeps the dtypes it was traced with, and what keeps its operands apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax


F32 = jnp.float32
X = jnp.linspace(0.1, 1.0, 16, dtype=F32).reshape(4, 4) + 2.0 * jnp.eye(4)
PRODUCT = X.astype("float16") @ X.astype("float16")


def assert_same(actual, expected):
    def check(a, b):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, tuple(actual) if isinstance(actual, list | tuple) else actual, expected)


AS_TRACED = {
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T),
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "qr": lambda x: tuple(jnp.linalg.qr(x)),
    "eigh": lambda x: jnp.linalg.eigvalsh(x + x.T),
    "det": jnp.linalg.det,
    "rfft": jnp.fft.rfft,
    "complex": lambda x: lax.complex(x, x),
    "bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "reduce": lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,)),
    "callback": lambda x: jax.pure_callback(
        lambda a: np.asarray(a) * np.float32(2), jax.ShapeDtypeStruct((4, 4), F32), x
    ),
    "scatter_apply": lambda x: x.at[0].apply(jnp.sin),
}


@pytest.mark.parametrize("name", [name for name in AS_TRACED if name not in ("cholesky", "det", "eigh")])
def test_opaque_operations_get_the_dtypes_they_were_traced_with(name):
    fn = AS_TRACED[name]
    actual = mpjax.autocast(lambda x: fn(x @ x), "float16")(X)
    assert_same(actual, fn(PRODUCT.astype(F32)))


@pytest.mark.parametrize("name", ["cholesky", "det", "eigh"])
def test_linear_algebra_works_on_the_result_of_a_product(name):
    actual = mpjax.autocast(lambda x: AS_TRACED[name](x @ x), "float16")(X)
    np.testing.assert_allclose(actual.astype(F32), AS_TRACED[name](X @ X), rtol=0.05, atol=0.1)


def test_a_function_applied_in_a_scatter_is_applied():
    out = mpjax.autocast(lambda x: x.at[0].apply(jnp.sin), "float16")(X)
    assert_same(out, X.at[0].apply(jnp.sin))


def test_operands_of_a_sort_and_of_a_barrier_keep_their_own_dtypes():
    keys, values = mpjax.autocast(lambda x: lax.sort((x @ x, x), num_keys=1), "float16")(X)
    assert_same((keys, values), lax.sort((PRODUCT, X), num_keys=1))
    assert_same(mpjax.autocast(lambda x: lax.optimization_barrier((x @ x, x)), "float16")(X), (PRODUCT, X))


@pytest.mark.parametrize("fn", [lambda x: jnp.split(x, 2)[0], lambda x: jnp.tile(x, (2, 1)), jnp.transpose, jnp.sort])
def test_shaping_a_half_value_leaves_it_half(fn):
    assert_same(mpjax.autocast(lambda x: fn(x @ x), "bfloat16")(X), fn(X.astype("bfloat16") @ X.astype("bfloat16")))


def test_pooling():
    image = jnp.sin(jnp.arange(32, dtype=F32)).reshape(1, 4, 4, 2)
    window = (1, 2, 2, 1), (1, 2, 2, 1), "VALID"

    def highest(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, *window)

    def total(x):
        return lax.reduce_window(x, 0.0, lax.add, *window)

    kernel = jnp.eye(2)
    half = image.astype("float16") @ kernel.astype("float16")
    assert_same(mpjax.autocast(lambda x: highest(x @ kernel), "float16")(image), highest(half))
    assert_same(mpjax.autocast(lambda x: total(x @ kernel), "float16")(image), total(half.astype(F32)))
    grad = jax.grad(lambda x: mpjax.autocast(lambda x: highest(x @ kernel), "float16")(x).astype(F32).sum())(image)
    assert_same(grad, jax.grad(lambda x: highest(x).sum())(image))


def test_debug_prints_run_once(capfd):
    def fn(x):
        jax.debug.print("value {}", x[0, 0])
        return x @ x

    jax.block_until_ready(jax.jit(mpjax.autocast(fn, "float16"))(X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("value") == 1


def test_a_kernel_gets_the_dtypes_it_was_traced_with():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] + x_ref[...]

    def kernel(x):
        return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct((4, 4), F32), interpret=True)(x)

    actual = jax.jit(mpjax.autocast(lambda x: kernel(x @ x), "float16"))(X)
    assert_same(actual, PRODUCT.astype(F32) * 2.0)
