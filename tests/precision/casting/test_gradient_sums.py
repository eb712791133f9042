"""Sums that only derivatives have are in float32: of arrays that are gathered, broadcast, or read many times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.precision.casting.gradient_sums import adding_to


TERMS = 4000
ROWS = jnp.arange(TERMS) % 3
WEIGHTS = jnp.abs(jnp.sin(jnp.arange(float(TERMS))))[:, None]
KERNEL, X = (jnp.abs(jax.random.normal(jax.random.key(seed), (16, 16))) / 4 for seed in (0, 1))


def half(x):
    """A product, which autocast rounds to half precision."""
    return x @ KERNEL


def in_every_step(x):
    array = half(x)
    step = lambda total, weight: (total + jnp.sum(array * weight[0]).astype(jnp.float32), None)  # noqa: E731
    return lax.scan(step, jnp.float32(0), WEIGHTS)[0]


PROGRAMS = {
    "gather": lambda x: jnp.sum(half(x)[ROWS]),
    "take": lambda x: jnp.sum(jnp.take(half(x), ROWS, axis=0) * WEIGHTS),
    "take_along_axis": lambda x: jnp.sum(jnp.take_along_axis(half(x), jnp.tile(ROWS[:, None], 16), 0) * WEIGHTS),
    "pairs": lambda x: jnp.sum(half(x)[ROWS, ROWS] * WEIGHTS[:, 0]),
    "segment_sum": lambda x: jnp.sum(jax.ops.segment_sum(half(x)[ROWS] * WEIGHTS, ROWS, 3)),
    "broadcast": lambda x: jnp.sum(jnp.sin(half(x)[0][None] * WEIGHTS)),
    "tile": lambda x: jnp.sum(jnp.tile(half(x), (TERMS // 16, 1)) * WEIGHTS),
    "repeat": lambda x: jnp.sum(jnp.repeat(half(x), TERMS // 16, axis=0) * WEIGHTS),
    "added to rows": lambda x: jnp.sum(half(jnp.tile(WEIGHTS, 16)) + half(x)[:1]),
    "multiplied with rows": lambda x: jnp.sum(half(jnp.tile(WEIGHTS, 16)) * half(x)[:1]),
    "vmap": lambda x: jnp.sum(jax.vmap(lambda weight: jnp.sin(weight * half(x)[0]))(WEIGHTS)),
    "pad": lambda x: jnp.sum(jnp.pad(half(x), ((0, TERMS - 16), (0, 0)), mode="edge") * WEIGHTS),
    "resize": lambda x: jnp.sum(jax.image.resize(half(x), (256, 256), "nearest")),
    "average pool": lambda x: jnp.sum(
        lax.reduce_window(half(x)[None, :, :, None], 0.0, lax.add, (1, 8, 8, 1), (1, 1, 1, 1), "SAME")
    ),
    "many reads": lambda x: sum(jnp.sum(y * abs(np.sin(i))) for y in [half(x)] for i in range(300)),
    "many products": lambda x: sum(jnp.sum(y @ (KERNEL + i)) for y in [half(x)] for i in range(40)),
    "many shifts": lambda x: sum(jnp.sum(jnp.roll(y, i, 0) * WEIGHTS[:16]) for y in [half(x)] for i in range(40)),
    "copies of it": lambda x: jnp.sum(jnp.concatenate([half(x)] * 200) * WEIGHTS[:3200]),
    "scan": in_every_step,
    "map": lambda x: jnp.sum(lax.map(lambda weight: jnp.sin(weight * half(x)[0]), WEIGHTS)),
}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_is_within_a_hundredth_of_float32s(name, policy):
    def fn(x):
        return PROGRAMS[name](x) / TERMS

    wanted = jax.grad(fn)(X)
    found = jax.jit(jax.grad(mpjax.autocast(fn, policy)))(X)
    assert float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)) < 0.01


def test_the_values_of_a_scan_and_its_derivative_forward_stay_as_they_are():
    def fn(x):
        return in_every_step(x) / TERMS

    value, slope = jax.jvp(mpjax.autocast(fn, "mixed_float16"), (X,), (jnp.ones_like(X),))
    np.testing.assert_allclose(value, fn(X), rtol=1e-3)
    np.testing.assert_allclose(slope, jnp.sum(jax.grad(fn)(X)), rtol=1e-3)


def test_each_read_of_an_array_adds_to_its_gradient_in_float32():
    x = jnp.ones((), jnp.bfloat16)

    def read(x):
        wide, array = x.astype(jnp.float32), lax.stop_gradient(x)
        return sum(adding_to(wide, array).astype(jnp.float32) for _ in range(300))

    assert (read(x), jax.grad(read)(x)) == (300.0, 300.0)
    assert jax.grad(lambda x: sum(x.astype(jnp.float32) for _ in range(300)))(x) == 256.0  # in bfloat16


def test_a_scan_that_runs_on_several_devices_adds_up_alike():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def fn(x, weights):
        def local(x, weights):
            array = half(x)
            step = lambda total, weight: (total + jnp.sum(array * weight[0]).astype(jnp.float32), None)  # noqa: E731
            zero = lax.pcast(jnp.float32(0), "data", to="varying")
            return lax.psum(lax.scan(step, zero, weights)[0], "data")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(x, weights) / TERMS

    wanted = jax.grad(fn)(X, WEIGHTS)
    found = jax.jit(jax.grad(mpjax.autocast(fn, "mixed_bfloat16")))(X, WEIGHTS)
    assert float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)) < 0.01
